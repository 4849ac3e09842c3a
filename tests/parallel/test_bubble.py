"""The simulated bubble against closed formulas."""

from dataclasses import replace
from functools import partial
from random import Random
from time import process_time

import pytest

from models.config import ModelConfig, Position
from parallel.bubble import COST, Pass, Turn, bubble, lasts, orders, simulate
from parallel.config import ParallelConfig, Schedule, Strategy
from parallel.planning.activations import peak_bytes
from parallel.planning.stages import (
    ROUNDS,
    extrapolated,
    order_of,
    runs,
    stages_per_rank,
    unsplit,
)
from parallel.planning.traffic import Batch, gathers, gathers_of_step

LOOPED = (Schedule["interleaved_1f1b"], Schedule["looped_bfs"], Schedule["interleaved_zero_bubble"])
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


def test_a_stage_that_cannot_be_split_makes_its_backward_pass_in_one() -> None:
    """The same work; others wait longer for it."""
    parallel = ParallelConfig(pp=2, schedule=Schedule["zbv"])
    model = ModelConfig(layers=4, dim=8, heads=2, vocab_size=1, position=Position.rotary, tied_head=False, mtp=1)
    assert unsplit(model, parallel) is None  # each weight is used at one depth
    assert unsplit(replace(model, tied_head=True), parallel) == unsplit(replace(model, mtp=2), parallel) == 3
    plain, whole = orders(parallel, 8), orders(parallel, 8, 3)
    of_last = [one for rank in whole for turn in rank for one in turn if one.stage == 3]
    assert {one.kind for one in of_last} == {"F", "B"} and len(set(of_last)) == len(of_last) == 16
    assert sum(COST[one.kind] for one in of_last) == 3 * 8
    seconds = dict.fromkeys(range(4), 1.0)
    assert simulate(plain, seconds) < simulate(whole, seconds) < 0.2


@pytest.mark.parametrize("schedule", [schedule for schedule in Schedule if schedule.name != "1f1b"])
def test_torch_takes_the_micro_batches_that_are_let_through(schedule: Schedule) -> None:
    """And no others: its own checks are the source."""
    for pp in (2, 3):
        parallel = ParallelConfig(pp=pp, schedule=schedule)
        for count in range(1, 8):
            if runs(parallel, count):
                assert 0 <= share(parallel, count) < 1
            else:
                with pytest.raises((ValueError, RuntimeError)):
                    orders(parallel, count)


@pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name)
def test_a_long_step_is_told_from_short_ones(schedule: Schedule) -> None:
    """Time, memory and gathers, against the passes of the whole step; stages of unequal cost."""
    draw = Random(0)
    for pp, count in ((2, 41), (4, 64), (4, 48), (5, 90), (10, 110)):  # 110: ten rounds of eleven
        each = 4 if pp == 2 and schedule in LOOPED else None
        parallel = ParallelConfig(strategy=Strategy.fsdp2, pp=pp, dp_shard=2, schedule=schedule, stages_per_rank=each)
        if not runs(parallel, count):
            continue
        assert count // pp > ROUNDS
        seconds = {index: draw.uniform(0.5, 1.5) for index in range(pp * stages_per_rank(parallel))}
        told = extrapolated(partial(duration, parallel, seconds), parallel, count)
        assert told == pytest.approx(duration(parallel, seconds, count), rel=1e-3)
        for rank in (0, pp - 1):
            told = extrapolated(partial(peak, parallel, rank, seconds), parallel, count)
            assert told == pytest.approx(peak(parallel, rank, seconds, count))
            order = order_of(parallel, count, rank)
            held = {stage for _, stage in order}
            assert gathers_of_step(held, parallel, Batch(1, count, 1), rank) == gathers(order, parallel)


def duration(parallel: ParallelConfig, seconds: dict[int, float], count: int) -> float:
    return lasts(orders(parallel, count), seconds)


def peak(parallel: ParallelConfig, rank: int, kept: dict[int, float], count: int) -> float:
    return peak_bytes(order_of(parallel, count, rank), kept, kept)


@pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name)
def test_any_number_of_micro_batches_is_told_at_once(schedule: Schedule) -> None:
    parallel = ParallelConfig(pp=16, schedule=schedule)
    began = process_time()
    assert 0 <= bubble(ModelConfig(layers=64, vocab_size=7), parallel, 2**20) < 0.01
    assert process_time() - began < 10  # minutes, and then no memory, where every pass is looked at


def test_an_order_that_cannot_end_is_told() -> None:
    order = orders(ParallelConfig(pp=2, schedule=Schedule["1f1b"]), 2)
    with pytest.raises(ValueError, match="circle"):
        simulate([order[0][::-1], order[1]], {0: 1.0, 1: 1.0})


def test_results_of_a_turn_are_sent_after_it() -> None:
    """Two stages and micro-batches, all passes of 1 second but backward ones of 2, written down by hand."""
    first, second = [[Pass(kind, stage, number) for kind in "FB" for number in (0, 1)] for stage in (0, 1)]
    alone: list[list[Turn]] = [[(one,) for one in first], [(one,) for one in second]]
    assert simulate(alone, {0: 1.0, 1: 1.0}) == pytest.approx(1 - 12 / 18)  # GPipe's 9 seconds
    together: list[list[Turn]] = [[(first[0], first[1]), (first[2],), (first[3],)], alone[1]]
    assert simulate(together, {0: 1.0, 1: 1.0}) == pytest.approx(1 - 12 / 20)  # the second begins at 2, not at 1
