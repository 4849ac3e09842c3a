"""Evaluations and the sample have other widths than training; tensor parallelism cuts them too."""

import pytest

from tests.runs.drive import Runs

# The choices of a continuation are 319 tokens wide, and a sample is padded to 64: neither is a multiple of 3.
WIDE = (
    "model.dim=36 model.heads=3 model.context=342 sequence_length=342 steps=4 checkpoint.every=4 "
    "metrics.sample_tokens=2 evals.heldout_tokens=2000"
)


def test_widths_that_tensor_parallelism_does_not_divide(runs: Runs) -> None:
    runs.finish("one-rank", WIDE)
    runs.finish("three-ranks", f"{WIDE} parallel=tp parallel.tp=3", ranks=3)
    expected = [line["value"] for line in runs.evals("one-rank")]
    assert len(expected) == 4
    assert [line["value"] for line in runs.evals("three-ranks")] == pytest.approx(expected, rel=1e-4)
