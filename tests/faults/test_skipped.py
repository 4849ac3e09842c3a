"""Steps with a gradient that is not finite: skipped by all ranks together, counted, and after so many the run ends."""

import math
import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.runs.drive import DROPOUT, FAILED, STEPS, Runs, hit_in_step, put

BAD = 5


def spoil(steps: list[int], rank: int, value: float) -> None:
    """On one rank the loss is not finite in these steps."""
    from parallel.apply import Spread
    from training import loop

    real_forward, real_seed, now = Spread.forward, loop.seed_step, 0

    def seed_step(seed: int, step: int, data_rank: int) -> None:
        nonlocal now
        now = step + 1
        real_seed(seed, step, data_rank)

    def forward(self: Spread, **inputs: Any) -> Any:
        loss = real_forward(self, **inputs)
        return loss * value if now in steps and self.model.training and here else loss

    here = rank == int(os.environ.get("RANK", "0"))
    put(Spread, "forward", forward)
    put(loop, "seed_step", seed_step)


@pytest.mark.parametrize(
    ("parallel", "ranks", "value"), [("single", 1, math.inf), ("ddp", 2, math.nan), ("fsdp2", 2, math.inf)]
)
def test_all_ranks_skip_together(runs: Runs, parallel: str, ranks: int, value: float) -> None:
    name, overrides = f"skipped-{parallel}", f"{DROPOUT} parallel={parallel} evals=none"
    runs.finish(name, overrides, partial(spoil, [BAD], ranks - 1, value), ranks=ranks)
    records, traced = runs.records(name), {step.step: step for step in runs.traced(name)}
    assert [line["skipped_steps"] for line in records] == [0] * (BAD - 1) + [1] * (STEPS - BAD + 1)
    assert records[BAD - 1]["grad_norm"] in ("nan", "inf")
    assert all(math.isfinite(line["grad_norm"]) for line in records if line["step"] != BAD)
    changed = [traced[step].weights != traced[step + 1].weights for step in range(1, STEPS)]
    assert changed == [step != BAD for step in range(1, STEPS)]
    for step in range(1, STEPS):  # and nobody alone
        ranks_changed = {
            one != other for one, other in zip(traced[step].weights, traced[step + 1].weights, strict=True)
        }
        assert ranks_changed == {step != BAD}, step
    if parallel == "ddp":
        assert {len(set(step.weights)) for step in traced.values()} == {1}
    assert [line["lr"] for line in records] == [traced[step].lr for step in range(1, STEPS + 1)]
    state = runs.state(name, STEPS)
    assert all(np.isfinite(value).all() for value in state.values())
    assert {float(value) for key, value in state.items() if key.endswith(".step")} == {STEPS - 1}


def test_the_rate_and_the_data_go_on(runs: Runs) -> None:
    """The schedule counts steps that were tried, so a skipped step moves neither it nor the data; also over a resume,
    which keeps the count."""
    runs.finish("straight", f"{DROPOUT} evals=none")
    spoiled = partial(spoil, [BAD], 0, math.nan)
    runs.finish("spoiled", f"{DROPOUT} evals=none", spoiled)
    runs.die("spoiled-broken", f"{DROPOUT} evals=none", spoiled, partial(hit_in_step, 8, signal.SIGKILL))
    runs.finish("spoiled-broken", f"{DROPOUT} evals=none", spoiled)
    assert [line["lr"] for line in runs.records("spoiled")] == [line["lr"] for line in runs.records("straight")]
    assert [step.rows for step in runs.traced("spoiled")] == [step.rows for step in runs.traced("straight")]
    assert runs.records("spoiled-broken") == runs.records("spoiled")
    assert runs.records("spoiled")[-1]["skipped_steps"] == 1
    assert runs.records("spoiled")[: BAD - 1] == runs.records("straight")[: BAD - 1]


@pytest.mark.parametrize(("parallel", "ranks"), [("single", 1), ("fsdp2", 2)])
def test_too_many_in_a_row_end_the_run(runs: Runs, parallel: str, ranks: int) -> None:
    name, overrides = f"hopeless-{parallel}", f"{DROPOUT} parallel={parallel} optimizer.max_skipped=3 evals=none"
    outcomes = runs.start(name, overrides, partial(spoil, list(range(4, 13)), 0, math.nan), ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [FAILED] * ranks
    assert {len([step for step in runs.traced(name) if step.step > 6])} == {0}
    status = runs.status(name)
    assert (
        status["state"] == "failed" and "3 steps in a row" in status["message"] and "optimizer.lr" in status["message"]
    )
    assert runs.checkpoints(name) == [3]  # the last that is good
    if ranks == 1:
        assert "Traceback" not in outcomes[0].said and "3 steps in a row" in outcomes[0].said


def test_fewer_in_a_row_do_not(runs: Runs) -> None:
    bad = [4, 5, 7, 8, 10, 11]
    runs.finish("hopeful", f"{DROPOUT} optimizer.max_skipped=3 evals=none", partial(spoil, bad, 0, math.nan))
    assert runs.records("hopeful")[-1]["skipped_steps"] == len(bad)
