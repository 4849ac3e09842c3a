"""The simulated bubble against closed formulas."""

from dataclasses import replace

import pytest

from parallel.bubble import COST, orders, simulate
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
        passes = [one for rank in orders(parallel, 8) for one in rank]
        assert len(set(passes)) == len(passes)
        work = sum(COST[one.kind] for one in passes)
        assert work == 3 * 8 * 2 * stages_per_rank(parallel)


def test_an_order_that_cannot_end_is_told() -> None:
    order = orders(ParallelConfig(pp=2, schedule=Schedule["1f1b"]), 2)
    with pytest.raises(ValueError, match="circle"):
        simulate([order[0][::-1], order[1]], {0: 1.0, 1: 1.0})
