"""Ranks that hold other values where they should hold the same: how the run ends. What is found, and in which layouts,
is in tests/training/test_agreement.py."""

import os
from functools import partial
from typing import Any

from tests.runs.drive import FAILED, Runs, put

PARANOID = "debug=paranoid evals=none checkpoint.every=0 steps=4"
BROKEN_STEP = 3


def broken_in_step(step: int, rank: int | None, untied: bool) -> None:
    """Before the step one rank (None: each) has another value in a norm, or a head of its own."""
    from torch import nn

    from training import loop
    from training.step import Step

    real_call, real_seed, now = Step.__call__, loop.seed_step, 0

    def seed_step(seed: int, done: int, coordinate: int) -> None:
        nonlocal now
        now = done + 1
        real_seed(seed, done, coordinate)

    def call(self: Step, *args: Any) -> Any:
        model: Any = self.spread.model
        if now == step and rank in (None, int(os.environ.get("RANK", "0"))):
            if untied:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            else:
                model.norm.weight.data[0] += 1.0
        return real_call(self, *args)

    put(loop, "seed_step", seed_step)
    put(Step, "__call__", call)


def test_the_run_ends_in_the_step_in_which_a_rank_differs(runs: Runs) -> None:
    broken = partial(broken_in_step, BROKEN_STEP, 1, False)
    outcomes = runs.start("broken", f"{PARANOID} parallel=ddp", broken, ranks=2)
    assert [outcome.code for outcome in outcomes] == [FAILED] * 2
    status = runs.status("broken")
    assert (status["state"], status["exit_code"]) == ("failed", FAILED)
    first, second, *_ = status["message"].splitlines()
    assert first.endswith("ReplicasDiffer: in step 3 ranks that should hold the same do not:")
    assert second == "parameter norm.weight: rank 1 differs from rank 0"
    assert runs.checkpoints("broken") == []


def test_without_it_the_run_goes_on(runs: Runs) -> None:
    broken = partial(broken_in_step, BROKEN_STEP, 1, False)
    runs.finish("unseen", f"{PARANOID} parallel=ddp debug=none", broken, ranks=2)


def test_a_head_that_is_tied_on_no_rank(runs: Runs) -> None:
    outcome = runs.start("untied", PARANOID, partial(broken_in_step, BROKEN_STEP, None, True))[0]
    assert outcome.code == FAILED and "Traceback" not in outcome.said
    assert "in step 3" in outcome.said and "tied weight head.weight: is tied on no rank" in outcome.said


def test_a_healthy_run_is_left_alone(runs: Runs) -> None:
    runs.finish("healthy", f"{PARANOID} parallel=hsdp parallel.dp_replicate=2 micro_batch=1", ranks=4)
    runs.finish("plain", f"{PARANOID} parallel=hsdp parallel.dp_replicate=2 micro_batch=1 debug=none", ranks=4)
    assert runs.records("healthy") == runs.records("plain")


def first_values_of_another_seed(rank: int) -> None:
    """One rank draws other first values of one parameter."""
    from parallel import materialize

    real = materialize.initial_rows

    def initial_rows(spec: Any, name: str, *args: Any) -> Any:
        values = real(spec, name, *args)
        return values + 1 if name == "norm.bias" and rank == int(os.environ["RANK"]) else values

    put(materialize, "initial_rows", initial_rows)


def test_a_run_of_other_first_values_does_not_start(runs: Runs) -> None:
    """Without debug=paranoid too. Of 2 copies of 2 shards, ranks 1 and 3 hold the same."""
    layout = "parallel=hsdp parallel.dp_replicate=2"
    outcomes = runs.start("first", f"{layout} steps=4", partial(first_values_of_another_seed, 3), ranks=4)
    assert [outcome.code for outcome in outcomes] == [FAILED] * 4
    assert "parameter norm.bias: rank 3 differs from rank 1" in runs.status("first")["message"]
    assert runs.records("first") == []
