"""Signals and time limits. What raises one runs in ranks of its own, so that a signal nobody handles ends no test."""

import logging
import os
import signal
import time
from typing import Any

import pytest

from tests.ranks import run_ranks
from training.faults import PATIENCE_SECONDS, SIGNALS, Stopped, StopRequest
from training.ranks import Ranks


def all_ranks() -> Ranks:
    import torch.distributed as dist

    return Ranks(dist.new_group(backend="gloo"))  # type: ignore[arg-type]


def hit(number: int) -> None:
    os.kill(os.getpid(), number)


def polls_until_stopped(request: StopRequest, signals: dict[int, tuple[int, int]], most: int = 12) -> tuple[int, str]:
    """Number of the poll that said to stop, and its cause. signals: rank -> (poll before which it is hit, by what)."""
    rank = int(os.environ["RANK"])
    for poll in range(most):
        if rank in signals and signals[rank][0] == poll:
            hit(signals[rank][1])
        stopped = request.poll()
        if stopped is not None:
            return poll, stopped.cause
    return most, "nothing"


def stop_by_signals(signals: dict[int, tuple[int, int]]) -> tuple[int, str]:
    request = StopRequest(None)
    with request.handlers():
        request.watch_steps(all_ranks())
        return polls_until_stopped(request, signals)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_one_rank_stops_all_in_the_same_step(number: signal.Signals) -> None:
    """One poll later, so that nobody waits for the answer."""
    assert run_ranks(3, stop_by_signals, {1: (4, number)}, group=True) == [(5, number.name)] * 3


def test_a_signal_to_all_ranks_at_different_steps() -> None:
    """As a launcher sends it: to all, but not at one moment. The first decides when."""
    signals = {0: (5, signal.SIGTERM), 1: (3, signal.SIGTERM), 2: (4, signal.SIGTERM)}
    assert run_ranks(3, stop_by_signals, signals, group=True) == [(4, "SIGTERM")] * 3


def test_different_signals_have_one_cause_on_all_ranks() -> None:
    signals = {0: (2, signal.SIGINT), 1: (2, signal.SIGUSR1)}
    first, second = run_ranks(2, stop_by_signals, signals, group=True)
    assert first == second
    assert first in [(3, "SIGINT"), (3, "SIGUSR1")]


def test_without_a_signal_nobody_stops() -> None:
    assert run_ranks(2, stop_by_signals, {}, group=True) == [(12, "nothing")] * 2


def test_alone_the_next_poll_says_it() -> None:
    assert run_ranks(1, stop_by_signals, {0: (4, signal.SIGUSR1)}, group=True) == [(4, "SIGUSR1")]


def stop_by_the_clock() -> tuple[int, str]:
    """Only the last rank's clock has reached the limit."""
    ranks = all_ranks()
    request = StopRequest(0.0 if ranks.rank == ranks.size - 1 else 1000.0)
    request.watch_steps(ranks)
    return polls_until_stopped(request, {})


@pytest.mark.parametrize("count", [1, 3])
def test_the_limit_of_one_ranks_clock_stops_all(count: int) -> None:
    late = 0 if count == 1 else 1
    assert run_ranks(count, stop_by_the_clock, group=True) == [(late, "max_minutes")] * count


def test_max_minutes_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    request = StopRequest(2.0)
    now += 119.0
    assert request.poll() is None
    now += 2.0
    stopped = request.poll()
    assert stopped is not None and stopped.cause == "max_minutes"
    with pytest.raises(Stopped, match="max_minutes"):
        request.check()


def polls_before_the_end(
    monkeypatch: pytest.MonkeyPatch, between: float, grace: float, save: float
) -> tuple[float, str]:
    """How long before the end of its Slurm job, 600 s after the first step, a run is told to stop, and by what."""
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    request = StopRequest(None, job_end=1600.0, grace_seconds=grace)
    now += 5000.0  # a slow start is not taken for a slow step
    request.job_end = 6600.0
    request.watch_steps(Ranks.alone())
    request.note_save(1, save)
    for _ in range(10_000):
        stopped = request.poll()
        if stopped is not None:
            return request.job_end - now, stopped.cause
        now += between
    raise AssertionError("never stopped")


@pytest.mark.parametrize(("between", "grace", "save"), [(1.0, 15.0, 2.0), (0.25, 15.0, 40.0), (30.0, 15.0, 2.0)])
def test_before_the_end_of_a_slurm_job_there_is_time_for_a_save(
    monkeypatch: pytest.MonkeyPatch, between: float, grace: float, save: float
) -> None:
    """Also where all ranks know of it one poll later; and not more than two polls too early."""
    left, cause = polls_before_the_end(monkeypatch, between, grace, save)
    assert cause == "the end of its Slurm job"
    needed = max(grace, save)
    assert needed + between <= left <= needed + 3 * between


def test_a_save_longer_than_the_notice_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("training"), "propagate", True)  # where another test has begun a run
    request = StopRequest(None, grace_seconds=15.0)
    for step, seconds in ((10, 14.0), (20, 16.0), (30, 17.0)):
        request.note_save(step, seconds)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["saving step 20 took 16.0 s"]


def stop_in(place: str, number: int) -> tuple[str, float]:
    """Before the first step, and in an evaluation, which looks between its batches."""
    request = StopRequest(None)
    began = time.monotonic()
    with request.handlers():
        if place == "evaluation":
            request.watch_steps(Ranks.alone())
        try:
            hit_later(number)
            for _ in range(40):
                time.sleep(0.5)
                if place == "evaluation":
                    request.check()
        except Stopped as stopped:
            return stopped.cause, time.monotonic() - began
    return "nothing", time.monotonic() - began


def hit_later(number: int) -> None:
    import threading

    threading.Timer(0.2, hit, [number]).start()


@pytest.mark.parametrize("place", ["before", "evaluation"])
def test_outside_the_steps_too(place: str) -> None:
    for number in SIGNALS:
        [(cause, seconds)] = run_ranks(1, stop_in, place, int(number))
        assert cause == number.name
        assert seconds < 10


def handlers_before_within_and_after() -> list[bool]:
    """Ours only within, also where the run fails."""
    mine: list[Any] = [signal.SIG_DFL, signal.default_int_handler, lambda number, frame: None]
    for number, handler in zip(SIGNALS, mine, strict=True):
        signal.signal(number, handler)
    within = []
    try:
        with StopRequest(None).handlers():
            within = [signal.getsignal(number) for number in SIGNALS]
            raise ValueError
    except ValueError:
        pass
    return [
        all(inside is not handler for inside, handler in zip(within, mine, strict=True)),
        [signal.getsignal(number) for number in SIGNALS] == mine,
    ]


def test_former_handlers_come_back() -> None:
    assert run_ranks(1, handlers_before_within_and_after) == [[True, True]]


def several_interrupts(patience: float, numbers: list[int]) -> str:
    request = StopRequest(None)
    with request.handlers():
        request.watch_steps(Ranks.alone())
        try:
            for number in numbers:
                hit(number)
                request.received_at -= patience
        except KeyboardInterrupt:
            return "ended"
        stopped = request.poll()
        return stopped.cause if stopped is not None else "nothing"


def test_a_second_interrupt_ends_at_once_but_the_launchers_copy_does_not() -> None:
    """torchrun passes on the Ctrl-C that the terminal has sent to its ranks already."""
    interrupt, term = int(signal.SIGINT), int(signal.SIGTERM)
    later = PATIENCE_SECONDS + 1
    cases = [
        (0.0, [interrupt, interrupt, interrupt], "SIGINT"),
        (later, [interrupt, interrupt], "ended"),
        (later, [term, term], "SIGTERM"),
        (later, [term, interrupt], "SIGTERM"),
        (0.0, [interrupt, term], "SIGINT"),
    ]
    for patience, numbers, expected in cases:
        assert run_ranks(1, several_interrupts, patience, numbers) == [expected], (patience, numbers)


def save_by_the_clock(others_are_late: bool) -> list[int]:
    """Polls once a "second"; a save takes place in the poll that says so. Only rank 0's clock counts."""
    ranks = all_ranks()
    request = StopRequest(None, every_minutes=4 / 60)
    now = 0.0 if ranks.rank == 0 else 1000.0 * others_are_late
    clock = pytest.MonkeyPatch()
    clock.setattr(time, "monotonic", lambda: now)
    request.watch_steps(ranks)
    saves = []
    for poll in range(14):
        assert request.poll() is None
        if request.save_due:
            saves.append(poll)
            request.saved()
        now += 1.0 if ranks.rank == 0 else 17.0
    clock.undo()
    return saves


@pytest.mark.parametrize(("count", "polls"), [(1, [4, 8, 12]), (3, [5, 10])])
def test_rank_0s_clock_asks_all_for_one_save_each_time(count: int, polls: list[int]) -> None:
    """The answer that is on its way when the save is made asks for no second one."""
    assert run_ranks(count, save_by_the_clock, True, group=True) == [polls] * count


def save_otherwise() -> list[bool]:
    """The clock begins anew with a save of another kind, also where it has asked already."""
    ranks = all_ranks()
    request = StopRequest(None, every_minutes=0.0)
    request.watch_steps(ranks)
    request.poll()
    request.saved()
    request._save_seconds = 1000.0
    seen = []
    for _ in range(3):
        request.poll()
        seen.append(request.save_due)
    return seen


def test_a_save_of_another_kind_is_one_too() -> None:
    assert run_ranks(2, save_otherwise, group=True) == [[False] * 3] * 2
