"""Who waited for, in words."""

import threading
from typing import Any

import pytest

from tests.ranks import run_ranks
from training.watchdog import Account, describe, ranks_told, waits_in

BUSY = Account(7, "the forward pass", 30, "")
AHEAD = Account(7, "the backward pass", 31, "")
WAITING = Account(7, "the forward pass", 30, "all_reduce, called by sum_over (mesh.py:110)")


@pytest.mark.parametrize(
    ("accounts", "told"),
    [
        ([BUSY, BUSY], None),
        ([BUSY], None),
        (
            [AHEAD, BUSY, AHEAD, AHEAD],
            "rank 1 waited for in step 7, the forward pass; ranks 0, 2-3 ahead in step 7, the backward pass",
        ),
        (
            [WAITING, BUSY, AHEAD],
            "rank 1 waited for in step 7, the forward pass; "
            "rank 0 waiting in all_reduce, called by sum_over (mesh.py:110) in step 7, the forward pass; "
            "rank 2 ahead in step 7, the backward pass",
        ),
        (
            [WAITING, WAITING],
            "ranks 0-1 waiting in all_reduce, called by sum_over (mesh.py:110) in step 7, the forward pass",
        ),
        ([BUSY, None], "rank 1 gave no answer; rank 0 waited for in step 7, the forward pass"),
        ([None, WAITING, None], "ranks 0, 2 gave no answer; rank 1 waiting in "),
    ],
)
def test_who_is_waited_for(accounts: list[Account | None], told: str | None) -> None:
    found = describe(accounts)
    assert found is None if told is None else found is not None and found.startswith(told), found


def test_ranks_in_words() -> None:
    assert [ranks_told(ranks) for ranks in ([3], [0, 2, 3, 4], [0, 1, 5])] == ["rank 3", "ranks 0, 2-4", "ranks 0-1, 5"]


def test_a_busy_process_waits_in_nothing() -> None:
    assert waits_in() == ""


def seen_waiting(kind: str) -> str:
    """What another thread sees of rank 0's main thread, which waits for rank 1 for a while."""
    import os
    import time

    import torch
    import torch.distributed as dist

    found: list[str] = []
    seconds = 0.5

    def look() -> None:
        time.sleep(seconds / 2)
        found.append(waits_in())

    thread = threading.Thread(target=look)
    thread.start()
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    value: Any = torch.ones(3)
    if kind == "all_reduce":
        dist.all_reduce(value)
    elif kind == "work":
        dist.all_reduce(value, async_op=True).wait()
    else:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, 1)
    thread.join()
    return found[0]


@pytest.mark.torch211
@pytest.mark.parametrize("kind", ["all_reduce", "work", "all_gather_object"])
def test_a_collective_is_seen(kind: str) -> None:
    waiting, busy = run_ranks(2, seen_waiting, kind, group=True)
    name, _, caller = waiting.partition(", called by ")
    assert name.startswith({"all_reduce": "all_reduce", "work": "wait", "all_gather_object": "all_gather"}[kind]), name
    assert caller.startswith("seen_waiting (test_watchdog.py:"), waiting
    assert busy == ""
