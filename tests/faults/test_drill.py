"""The drill: runs are killed at random instants, again and again, and give what the unbroken run gives, bit for bit.

`-m drill` has 200 kills; KILLS=<a number> another number, DRILL_SEED=<a number> other instants."""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.resume.same import check_same_bits
from tests.runs.drive import DROPOUT, Runs
from training.checkpoint import storage
from training.checkpoint.folders import read

# A checkpoint after every second step, two of which are kept, scores after every third.
RUN = f"{DROPOUT} checkpoint.every=2 checkpoint.keep=2 evals.every=3"
LAYOUTS = [
    (1, ""),
    (2, "parallel=fsdp2"),
    (2, "parallel=ddp checkpoint.background=thread"),
    (2, "parallel=pp checkpoint.permanent_every=4"),
    (4, "parallel=fsdp2 parallel.tp=2"),
]
SEED = int(os.environ.get("DRILL_SEED", "0"))
KILLS = int(os.environ.get("KILLS", "200"))


@dataclass
class Whole:
    """An unbroken run."""

    name: str
    seconds: float


def unbroken(runs: Runs, number: int) -> Whole:
    ranks, overrides = LAYOUTS[number]
    began = time.monotonic()
    runs.finish(f"unbroken-{number}", f"{RUN} {overrides}", ranks=ranks)
    return Whole(f"unbroken-{number}", time.monotonic() - began)


def kill_after(seconds: float, rank: int) -> None:
    """A clock kills this rank, wherever it is then."""
    if rank == int(os.environ.get("RANK", "0")):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def all_readable(folder: Path) -> None:
    """Each checkpoint that says it is complete has all of its bytes."""
    for marker in folder.glob("step-*/COMPLETE"):
        saved = read(marker.parent)
        assert storage.faults(saved.folder, saved.files) == []


def broken(runs: Runs, number: int, name: str, whole: Whole, chance: random.Random) -> int:
    """A run until it ends. How often it was killed."""
    ranks, overrides = LAYOUTS[number]
    killed = 0
    while True:
        kill = partial(kill_after, chance.uniform(0, whole.seconds), chance.randrange(ranks))
        if not runs.is_killed(name, f"{RUN} {overrides}", kill, ranks=ranks):
            break
        killed += 1
        all_readable(runs.folder(name) / "checkpoints")
    check_same_bits(runs, name, whole.name)
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in (1, 2))) for n in range(5)]
)
def test_killed_at_random_instants(runs: Runs, number: int) -> None:
    chance = random.Random(f"{SEED} short {number}")
    whole, kills, turn = unbroken(runs, number), 0, 0
    while kills < 2:
        kills += broken(runs, number, f"short-{number}-{turn}", whole, chance)
        turn += 1


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times(runs: Runs) -> None:
    wholes = [unbroken(runs, number) for number in range(len(LAYOUTS))]
    chance, kills, turn = random.Random(SEED), [0] * len(LAYOUTS), 0
    while sum(kills) < KILLS:
        number = turn % len(LAYOUTS)
        kills[number] += broken(runs, number, f"drill-{turn}", wholes[number], chance)
        turn += 1
    print(f"DRILL_SEED={SEED}: {sum(kills)} kills of {turn} runs")
    for (ranks, overrides), times in zip(LAYOUTS, kills, strict=True):
        print(f"  {times:4} on {ranks} x {overrides or 'parallel=single'}")
