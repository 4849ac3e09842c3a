"""A stage that dies, or hangs, in the midst of a step's passes ends the others, which say so."""

import contextlib
import os
import re
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.ranks import RanksFailed
from tests.runs.drive import Runs, hit, put

LAYOUT = "parallel.pp=2 parallel.timeout_seconds=2 evals=none checkpoint.every=3"
STEP = 5


def in_pass(step: int, rank: int, pass_number: int, hangs: bool) -> None:
    """In this pass of the step (from 1) the rank is killed, or computes for longer than others wait."""
    from parallel.pipeline import TimedStage
    from training import loop

    real_seed, now, passes = loop.seed_step, 0, 0

    def seed_step(seed: int, done: int, coordinate: int) -> None:
        nonlocal now, passes
        now, passes = done + 1, 0
        real_seed(seed, done, coordinate)

    def counted(real: Any) -> Any:
        def call(self: TimedStage, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            if (now, passes, rank) == (step, pass_number, int(os.environ["RANK"])):
                time.sleep(30) if hangs else hit(signal.SIGKILL)
            return real(self, *args, **kwargs)

        return call

    put(loop, "seed_step", seed_step)
    for name in ("forward_one_chunk", "backward_one_chunk"):
        put(TimedStage, name, counted(getattr(TimedStage, name)))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_other_stage_ends_at_once(runs: Runs, rank: int) -> None:
    name, other = f"stage-{rank}", 1 - rank
    with contextlib.suppress(RanksFailed):  # the rank that died
        runs.start(name, LAYOUT, partial(in_pass, STEP, rank, 4, False), ranks=2, timeout=20)
    status = runs.status(name)
    assert (status["state"], status["checkpoint"]) == ("failed", 3)
    assert re.match(rf"rank {other}: RuntimeError: ", status["message"]), status
    assert "imed out" not in status["message"], status
    log = runs.folder(name) / ("run.log" if other == 0 else "run.rank1.log")
    assert f"on rank {other}, after step 4 and before the end of step 5" in log.read_text()
    runs.finish(name, LAYOUT, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_hangs_ends_the_run_within_the_timeout(runs: Runs, rank: int) -> None:
    """Within one, though gloo keeps to the one of the first step where a stage waits for another."""
    name, began = f"stage-hangs-{rank}", time.monotonic()
    with pytest.raises(RanksFailed):
        runs.start(name, LAYOUT, partial(in_pass, STEP, rank, 4, True), ranks=2, timeout=25)
    status = runs.status(name)
    assert (status["state"], status["checkpoint"], status["exit_code"]) == ("failed", 3, 3)
    found = f"no rank has got on for 2 s: rank {rank} waited for in step 5, the pipeline's passes; "
    assert status["message"].startswith(f"{found}rank {1 - rank} waiting in "), status
    assert time.monotonic() - began < 20
