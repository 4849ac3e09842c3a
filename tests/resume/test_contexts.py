"""A run that goes on with ranks that share sequences, in another way, or without them, and back."""

import signal
from functools import partial

import pytest

from tests.resume.same import check_near
from tests.runs.drive import Runs, hit_in_step

TERM, KILL = signal.SIGTERM, signal.SIGKILL
RUN = "precision=fp64 evals.heldout_tokens=100 evals.continuation_items=2 metrics.sample_tokens=4 checkpoint.every=2"


@pytest.mark.slow
def test_other_ways_of_sharing_sequences(runs: Runs) -> None:
    """In float64, where what is more than rounding shows."""
    runs.finish("whole-contexts", RUN)
    runs.start("contexts", RUN, partial(hit_in_step, 2, TERM))
    runs.die("contexts", f"{RUN} parallel.cp=2", partial(hit_in_step, 4, KILL), ranks=2)
    runs.start("contexts", f"{RUN} parallel.cp=4 parallel.context=ring", partial(hit_in_step, 5, TERM, 0), ranks=4)
    ulysses = f"{RUN} parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"
    runs.start("contexts", ulysses, partial(hit_in_step, 8, TERM, 0), ranks=4)
    runs.start("contexts", RUN, partial(hit_in_step, 10, TERM))
    runs.finish("contexts", f"{RUN} parallel=tp parallel.tp=2 parallel.cp=2", ranks=4)
    check_near(runs, "contexts", "whole-contexts", relative=1e-9, state=1e-8)
