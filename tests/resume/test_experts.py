"""A run of a model with experts that goes on with them on other ranks, and back."""

import signal
from functools import partial

import pytest

from tests.resume.same import check_near
from tests.runs.drive import Runs, hit_in_step

TERM, KILL = signal.SIGTERM, signal.SIGKILL
EXPERTS = (
    "model.moe.experts=4 model.moe.shared=1 model.moe.dense_layers=1 model.moe.balance=step model.moe.bias_rate=0.01"
)
RUN = (
    f"precision=fp64 {EXPERTS} model.moe.bias_rate=0.01 evals.heldout_tokens=100 evals.continuation_items=2 "
    "metrics.sample_tokens=4"
)


@pytest.mark.slow
def test_experts_on_other_ranks(runs: Runs) -> None:
    """In float64, where what is more than rounding shows; the loads and biases of routers too."""
    runs.finish("whole-experts-apart", RUN)
    runs.start("experts-apart", RUN, partial(hit_in_step, 2, TERM))
    runs.die("experts-apart", f"{RUN} parallel=fsdp2 parallel.ep=2", partial(hit_in_step, 5, KILL), ranks=2)
    runs.start(
        "experts-apart", f"{RUN} parallel=tp parallel.tp=2 parallel.ep=2", partial(hit_in_step, 6, TERM, 0), ranks=2
    )
    runs.start("experts-apart", f"{RUN} parallel=fsdp2 parallel.ep=4", partial(hit_in_step, 8, TERM, 0), ranks=4)
    runs.start("experts-apart", f"{RUN} parallel=ddp", partial(hit_in_step, 10, TERM, 0), ranks=2)
    runs.finish("experts-apart", f"{RUN} parallel=fsdp2 parallel.cp=2 parallel.ep=2", ranks=4)
    check_near(runs, "experts-apart", "whole-experts-apart", relative=1e-9, state=1e-8)
