"""The simulated bubble against closed formulas."""

from dataclasses import replace

import pytest

from parallel.bubble import COST, Pass, orders, simulate
from parallel.config import ParallelConfig, Schedule
from parallel.planning.stages import stages_per_rank

EVEN = [(pp, count) for pp in (2, 4) for count in (4, 8, 16)]


def share(parallel: ParallelConfig, count: int) -> float:
    number = parallel.pp * stages_per_rank(parallel)
    return simulate(orders(parallel, count), dict.fromkeys(range(number), 1.0))


@pytest.mark.parametrize(("pp", "count"), EVEN)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_a_rank(schedule: str, pp: int, count: int) -> None:
    """(p - 1) / (m + p - 1) (Huang et al. 2019, GPipe; Narayanan et al. 2021)."""
    found = share(ParallelConfig(pp=pp, schedule=Schedule[schedule]), count)
    assert found == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize(("pp", "count"), EVEN)
def test_interleaved(pp: int, count: int) -> None:
    """(p - 1) / (v m + p - 1) (Narayanan et al. 2021, Efficient Large-Scale Language Model Training, 2.2)."""
    for each in (2, 3):
        found = share(ParallelConfig(pp=pp, schedule=Schedule["interleaved_1f1b"], stages_per_rank=each), count)
        assert found == pytest.approx((pp - 1) / (each * count + pp - 1))


@pytest.mark.parametrize("pp", [2, 4])
def test_split_backwards_wait_less(pp: int) -> None:
    """Zero bubble (Qi et al. 2023): with equal costs of F, I and W the V-shaped schedule waits almost never."""
    parallel = ParallelConfig(pp=pp, schedule=Schedule["1f1b"])
    plain = share(parallel, 4 * pp)
    assert share(replace(parallel, schedule=Schedule["interleaved_zero_bubble"]), 4 * pp) < plain
    assert share(replace(parallel, schedule=Schedule["zbv"]), 4 * pp) < 0.25 * plain


def test_every_pass_is_there_once() -> None:
    for schedule in Schedule:
        parallel = ParallelConfig(pp=2, schedule=schedule)
        passes = [one for rank in orders(parallel, 8) for turn in rank for one in turn]
        assert len(set(passes)) == len(passes)
        work = sum(COST[one.kind] for one in passes)
        assert work == 3 * 8 * 2 * stages_per_rank(parallel)


def test_an_order_that_cannot_end_is_told() -> None:
    order = orders(ParallelConfig(pp=2, schedule=Schedule["1f1b"]), 2)
    with pytest.raises(ValueError, match="circle"):
        simulate([order[0][::-1], order[1]], {0: 1.0, 1: 1.0})


def test_results_of_a_turn_are_sent_after_it() -> None:
    """Two stages and micro-batches, all passes of 1 second but backward ones of 2, written down by hand."""
    first, second = [[Pass(kind, stage, number) for kind in "FB" for number in (0, 1)] for stage in (0, 1)]
    alone = [[(one,) for one in first], [(one,) for one in second]]
    assert simulate(alone, {0: 1.0, 1: 1.0}) == pytest.approx(1 - 12 / 18)  # GPipe's 9 seconds
    together = [[(first[0], first[1]), (first[2],), (first[3],)], alone[1]]
    assert simulate(together, {0: 1.0, 1: 1.0}) == pytest.approx(1 - 12 / 20)  # the second begins at 2, not at 1
