"""checkpoint.background=thread: what goes wrong while a checkpoint is written and the steps go on."""

import errno
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.resume.same import check_same_bits, check_steps
from tests.runs.drive import DROPOUT, FAILED, SAVED, Runs, hit_in_step, put

KILL, TERM = signal.SIGKILL, signal.SIGTERM
THREAD = f"{DROPOUT} checkpoint.background=thread"
LAYOUTS = {1: "", 2: " parallel=fsdp2"}
RANKS = pytest.mark.parametrize("ranks", LAYOUTS)


def in_write(number: int, doing: Any, rank: int | None = None) -> None:
    """Does this in the thread that writes, before it writes the number-th checkpoint."""
    from training.checkpoint import tensors

    real, seen = tensors.write, 0

    def write(*args: Any) -> Any:
        nonlocal seen
        if threading.current_thread() is not threading.main_thread():
            seen += 1
            if seen == number and rank in (None, int(os.environ.get("RANK", "0"))):
                doing()
        return real(*args)

    put(tensors, "write", write)


def slow(number: int, seconds: float) -> None:
    in_write(number, partial(time.sleep, seconds))


def full_disk(number: int, rank: int) -> None:
    """The disk of a rank is full while it writes the tensors of the number-th checkpoint."""
    from training.checkpoint.storage import Hashed

    def fill() -> None:
        def write(self: Hashed, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        put(Hashed, "write", write)

    in_write(number, fill, rank)


def raise_in_step(step: int) -> None:
    from training import loop

    real = loop.seed_step

    def seed_step(seed: int, done: int, coordinate: int) -> None:
        if done + 1 == step:
            raise ValueError("a bug")
        real(seed, done, coordinate)

    put(loop, "seed_step", seed_step)


@pytest.fixture(scope="module")
def wholes(runs: Runs) -> dict[int, str]:
    """Unbroken runs that wait for each save, by the number of ranks."""
    for ranks, layout in LAYOUTS.items():
        runs.finish(f"whole-{ranks}", DROPOUT + layout, ranks=ranks)
    return {ranks: f"whole-{ranks}" for ranks in LAYOUTS}


def files(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())["files"]


def check_same_run(runs: Runs, name: str, whole: str, steps: tuple[int, ...] = (12,)) -> None:
    check_steps(runs, name, whole)
    check_same_bits(runs, name, whole)
    for step in steps:
        ours, theirs = runs.checkpoint(name, step), runs.checkpoint(whole, step)
        assert files(ours) == files(theirs)
        assert (ours / "scores.json").read_bytes() == (theirs / "scores.json").read_bytes()


@RANKS
def test_checkpoints_are_those_of_a_run_that_waits(runs: Runs, wholes: dict[int, str], ranks: int) -> None:
    """File by file, by their checksums; and the scores beside them."""
    name = f"thread-{ranks}"
    runs.finish(name, THREAD + LAYOUTS[ranks], ranks=ranks)
    check_same_run(runs, name, wholes[ranks], (3, 6, 9, 12))
    lines = [json.loads(line) for line in (runs.folder(name) / "metrics.jsonl").read_text().splitlines()]
    stalled = {line["step"] for line in lines if line.get("save_stall_seconds", -1) >= 0}
    assert {4, 7, 10} <= stalled


@RANKS
def test_killed_while_it_writes(runs: Runs, wholes: dict[int, str], ranks: int) -> None:
    """The one before is there, also with keep=1, and the run goes on from it."""
    name, keys = f"killed-{ranks}", f"{THREAD} checkpoint.keep=1{LAYOUTS[ranks]}"
    runs.die(name, keys, partial(slow, 2, 30), partial(hit_in_step, 8, KILL), ranks=ranks)
    assert runs.checkpoints(name) == [3] and runs.checkpoint(name, 6).exists()
    said = runs.finish(name, keys, ranks=ranks)
    assert "step-000006 is not used: the save did not end" in said
    assert f"going on from {runs.checkpoint(name, 3)}" in said
    check_same_run(runs, name, wholes[ranks])
    assert runs.checkpoints(name) == [9, 12]


@RANKS
def test_a_full_disk(runs: Runs, wholes: dict[int, str], ranks: int) -> None:
    """Of the last rank alone: all stop with its reason within two steps, and what was there stays."""
    name, keys = f"full-{ranks}", f"{THREAD} checkpoint.keep=1{LAYOUTS[ranks]}"
    outcomes = runs.start(name, keys, partial(full_disk, 2, ranks - 1), ranks=ranks)
    for outcome in outcomes:
        assert outcome.code == FAILED
        told = outcome.error if ranks > 1 else outcome.said
        assert f"step 6 was not saved: rank {ranks - 1} failed on" in told and "No space left" in told
    assert runs.checkpoints(name) == [3] and not runs.checkpoint(name, 6).exists()
    status = runs.status(name)
    assert (status["state"], status["checkpoint"]) == ("failed", 3)
    runs.finish(name, keys, ranks=ranks)
    check_same_run(runs, name, wholes[ranks])


@RANKS
def test_the_next_save_waits_and_says_so(runs: Runs, wholes: dict[int, str], ranks: int) -> None:
    name = f"slow-{ranks}"
    said = runs.finish(name, f"{THREAD}{LAYOUTS[ranks]} evals=none", partial(slow, 1, 3), ranks=ranks)
    assert "the save of step 6 waited" in said
    assert runs.checkpoints(name) == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        assert files(runs.checkpoint(name, step)) == files(runs.checkpoint(wholes[ranks], step))
    lines = [json.loads(line) for line in (runs.folder(name) / "metrics.jsonl").read_text().splitlines()]
    assert lines[6]["save_stall_seconds"] > 1 > lines[3]["save_stall_seconds"]


@RANKS
def test_a_signal_while_it_writes(runs: Runs, wholes: dict[int, str], ranks: int) -> None:
    """Both checkpoints are complete when the run ends: the one that is being written, and that of the signal."""
    name, keys = f"signal-{ranks}", THREAD + LAYOUTS[ranks]
    outcomes = runs.start(name, keys, partial(slow, 2, 1), partial(hit_in_step, 7, TERM, ranks - 1), ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [SAVED if ranks == 1 else 0] * ranks
    assert runs.checkpoints(name) == [3, 6, 6 + ranks]  # with several ranks the answer comes one step later
    assert runs.status(name)["checkpoint"] == 6 + ranks
    assert (runs.checkpoint(name, 6) / "scores.json").exists()
    runs.finish(name, keys, ranks=ranks)
    check_same_run(runs, name, wholes[ranks], (3, 6, 9, 12))


def test_a_signal_in_the_step_that_saves(runs: Runs, wholes: dict[int, str]) -> None:
    """It ends when what it saves in the background is complete."""
    runs.start("at-once", THREAD, partial(slow, 2, 1), partial(hit_in_step, 6, TERM))
    assert runs.checkpoints("at-once") == [3, 6] and runs.status("at-once")["checkpoint"] == 6
    runs.finish("at-once", THREAD)
    check_same_run(runs, "at-once", wholes[1])


def test_a_run_that_fails_lets_the_save_end(runs: Runs, wholes: dict[int, str]) -> None:
    outcome = runs.start("failed", THREAD, partial(slow, 2, 1), partial(raise_in_step, 7))[0]
    assert "a bug" in outcome.error and runs.checkpoints("failed") == [3, 6]
    runs.finish("failed", THREAD)
    check_same_run(runs, "failed", wholes[1])


def test_killed_when_complete_but_not_scored(runs: Runs, wholes: dict[int, str]) -> None:
    """A permanent checkpoint whose scores were not beside it yet is scored when the run goes on."""
    runs.die("unscored", THREAD, partial(kill_before_scores, 2))
    assert runs.checkpoints("unscored") == [3, 6] and not (runs.checkpoint("unscored", 6) / "scores.json").exists()
    runs.finish("unscored", THREAD)
    check_same_run(runs, "unscored", wholes[1], (3, 6, 9, 12))


def kill_before_scores(number: int) -> None:
    from training.checkpoint import folders

    real, seen = folders.write_scores, 0

    def write_scores(*args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), KILL)
        real(*args)

    put(folders, "write_scores", write_scores)
