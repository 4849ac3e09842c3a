"""Runs that keep documents apart: they go on as if nothing had happened, on other ranks too, and are scored alike."""

import signal
from functools import partial

import pytest

from tests.resume.same import check_near, check_same_bits, check_steps
from tests.runs.drive import REFUSED, Runs, hit_in_step

TERM = signal.SIGTERM
APART = "data.mask_documents=true"


def test_a_restart_is_invisible(runs: Runs) -> None:
    said = runs.finish("whole-apart", APART)
    assert "attention: sdpa (the device is cpu)" in said
    runs.start("apart", APART, partial(hit_in_step, 5, TERM))
    (outcome,) = runs.start("apart", "data.mask_documents=false")
    assert outcome.code == REFUSED and "data.mask_documents" in outcome.said
    runs.finish("apart", APART)
    check_steps(runs, "apart", "whole-apart")
    check_same_bits(runs, "apart", "whole-apart")


def test_a_checkpoint_is_scored_as_it_was_trained(runs: Runs) -> None:
    """With the masks, which are the checkpoint's; and these change what is learned."""
    runs.finish("apart-scored", f"{APART} steps=3")
    runs.finish("together-scored", "steps=3")
    runs.finish("apart-again", f"eval_only=true checkpoint.load={runs.folder('apart-scored')}")
    scores = [line["value"] for line in runs.evals("apart-scored")]
    assert [line["value"] for line in runs.evals("apart-again")] == scores
    losses = [[line["loss"] for line in runs.records(name)] for name in ("apart-scored", "together-scored")]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_on_other_ranks(runs: Runs) -> None:
    run = f"{APART} precision=fp64 evals.continuation_items=2 metrics.sample_tokens=4"
    runs.finish("whole-apart-ranks", run)
    ways = ["parallel.cp=2 parallel.context=ring", "parallel=tp", "parallel=pp"]
    for step, words in zip((2, 5, 8), ways, strict=True):  # a start ends one step after the signal
        runs.start("apart-ranks", f"{run} {words}", partial(hit_in_step, step, TERM, 0), ranks=2)
    runs.finish("apart-ranks", f"{run} parallel=fsdp2", ranks=2)
    check_near(runs, "apart-ranks", "whole-apart-ranks", relative=1e-9, state=1e-8)
