"""A rank that hangs ends the run within the time that was set; the run says who waited for, and by whom in what."""

import json
import os
import re
import time
from functools import partial
from typing import Any

import pytest

from tests.ranks import ROOT, RanksFailed
from tests.runs import processes
from tests.runs.drive import Runs, put

SECONDS = 3
LIMIT = f"parallel.timeout_seconds={SECONDS} evals=none checkpoint.every=3"
LAYOUTS = {"ddp": "parallel=ddp", "fsdp2": "parallel=fsdp2", "pp": "parallel.pp=2"}
HANG_SECONDS = 40


def hang_in_step(step: int, rank: int) -> None:
    """Before its first pass of the step, after all have counted what they predict."""
    from training import loop
    from training import step as of_steps

    real_seed, real_share, now = loop.seed_step, of_steps.share_losses, 0

    def seed_step(seed: int, done: int, coordinate: int) -> None:
        nonlocal now
        now = done + 1
        real_seed(seed, done, coordinate)

    def share_losses(*args: Any) -> None:
        if now == step and rank == int(os.environ["RANK"]):
            time.sleep(HANG_SECONDS)
        real_share(*args)

    put(loop, "seed_step", seed_step)
    put(of_steps, "share_losses", share_losses)


def hang_in_reading(step: int, rank: int) -> None:
    """The thread that reads batches."""
    from training.data.batches import Batches

    real = Batches._read

    def read(self: Batches, done: int, sample: int) -> Any:
        if done + 1 == step and rank == int(os.environ["RANK"]):
            time.sleep(HANG_SECONDS)
        return real(self, done, sample)

    put(Batches, "_read", read)


def hang_in_save(step: int, rank: int) -> None:
    from training.checkpoint import tensors

    real = tensors.write

    def write(folder: Any, *args: Any) -> Any:
        if folder.name == f"step-{step:06d}" and rank == int(os.environ["RANK"]):
            time.sleep(HANG_SECONDS)
        return real(folder, *args)

    put(tensors, "write", write)


HANGS = {
    "step": (hang_in_step, 5, "step 5", "share_losses"),
    "reading": (hang_in_reading, 5, "step 5, reading the batch", "read"),
    "save": (hang_in_save, 6, "step 6, saving", "write"),
}


@pytest.mark.parametrize(
    ("layout", "where", "rank"),
    [
        ("ddp", "step", 1),
        ("ddp", "reading", 1),
        ("ddp", "save", 1),
        ("pp", "step", 1),
        pytest.param("ddp", "step", 0, marks=pytest.mark.slow),
        pytest.param("ddp", "save", 0, marks=pytest.mark.slow),
        pytest.param("fsdp2", "step", 1, marks=pytest.mark.slow),
        pytest.param("fsdp2", "reading", 0, marks=pytest.mark.slow),
        pytest.param("pp", "step", 0, marks=pytest.mark.slow),
        pytest.param("pp", "reading", 0, marks=pytest.mark.slow),
        pytest.param("pp", "save", 1, marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_hangs_is_named(runs: Runs, layout: str, where: str, rank: int) -> None:
    name, overrides = f"hangs-{layout}-{where}-{rank}", f"{LAYOUTS[layout]} {LIMIT}"
    hang, step, told, frame = HANGS[where]
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        runs.start(name, overrides, partial(hang, step, rank), ranks=2, timeout=HANG_SECONDS - 5)
    assert time.monotonic() - began < HANG_SECONDS - 10
    assert str(failed.value).count("ended with code 3 before it returned") == 2
    status, other = runs.status(name), 1 - rank
    assert (status["state"], status["exit_code"], status["checkpoint"]) == ("failed", 3, 3)
    said = rf"no rank has got on for {SECONDS} s: rank {rank} waited for in {told}.*; rank {other} "
    said += r"(waiting in \w+, called by \w+ \(\w+\.py:\d+\)|ahead) in step "
    assert re.match(said, status["message"]), status["message"]
    assert status["message"] in (runs.folder(name) / "run.log").read_text()
    for number in range(2):
        stacks = (runs.folder(name) / "hang" / f"rank{number}.txt").read_text()
        innermost = rf'most recent call first\):\n  File "\S+test_hangs.py", line \d+ in {frame}\n'
        assert "most recent call first" in stacks
        assert (re.search(innermost, stacks) is not None) == (number == rank), stacks
        record = json.loads((runs.folder(name) / "hang" / f"rank{number}.json").read_text())
        assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])
    if where == "save":
        runs.finish(name, overrides, ranks=2)


def slow_in_step(step: int, seconds: float) -> None:
    """All ranks compute for long."""
    from training import loop

    real = loop.seed_step

    def seed_step(seed: int, done: int, coordinate: int) -> None:
        if done + 1 == step:
            time.sleep(seconds)
        real(seed, done, coordinate)

    put(loop, "seed_step", seed_step)


def test_ranks_that_are_all_busy_are_left_alone(runs: Runs) -> None:
    """However long that takes."""
    overrides = "parallel=ddp evals=none steps=4 parallel.timeout_seconds=1"
    runs.finish("busy", overrides, partial(slow_in_step, 3, 2.5), ranks=2)
    assert not (runs.folder("busy") / "hang").exists()


HANGING = """
import runpy, sys
from tests.faults.test_hangs import hang_in_step
hang_in_step(5, 1)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_under_torchrun(runs: Runs, tmp_path: Any) -> None:
    """The terminal has it, and torchrun ends at once."""
    script = tmp_path / "hanging.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{HANGING}")
    words = [*runs.words, "name=torchrun", *LAYOUTS["ddp"].split(), *LIMIT.split()]
    began = time.monotonic()
    result = processes.finish(processes.start([*processes.TORCHRUN, "2", str(script), *words]))
    assert result.returncode != 0 and time.monotonic() - began < HANG_SECONDS + 20
    assert "warning: no rank has got on for 3 s: rank 1 waited for in step 5" in result.stderr
    assert runs.status("torchrun")["exit_code"] == 3
