"""A run that goes on with another number of stages, another schedule, or without a pipeline, and back."""

import signal
from functools import partial

import pytest
from torch.distributed.pipelining import PipelineStage

from tests.resume.same import check_near
from tests.runs.drive import Runs, hit_in_step

TERM, KILL = signal.SIGTERM, signal.SIGKILL
RUN = "precision=fp64 model.layers=4 evals.heldout_tokens=100 evals.continuation_items=2 micro_batch=2"


def check_rows(runs: Runs, name: str, whole: str) -> None:
    """As check_steps, where every stage has the whole batch."""
    expected = {traced.step: traced for traced in runs.traced(whole)}
    found = runs.traced(name)
    assert {traced.step for traced in found} == set(expected)
    for traced in found:
        wanted = expected[traced.step]
        assert (traced.rows, traced.lr) == (wanted.rows * len(traced.weights), wanted.lr), traced.step


@pytest.mark.slow
@pytest.mark.skipif(hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"), reason="torch 2.11 cannot run it over gloo")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_other_stages_and_schedules(runs: Runs, tied: bool) -> None:
    """In float64, where what is more than rounding shows."""
    base, whole = f"{RUN} model.tied_head={str(tied).lower()}", f"whole-stages-{tied}"
    name = f"stages-{tied}"
    runs.finish(whole, base)
    runs.start(name, base, partial(hit_in_step, 2, TERM))
    runs.die(name, f"{base} parallel.pp=2", partial(hit_in_step, 4, KILL), ranks=2)
    runs.start(name, f"{base} parallel.pp=4 parallel.schedule=gpipe", partial(hit_in_step, 5, TERM, 0), ranks=4)
    runs.start(name, f"{base} parallel.pp=2 parallel.schedule=dualpipev", partial(hit_in_step, 8, TERM, 0), ranks=2)
    runs.start(name, base, partial(hit_in_step, 10, TERM))
    runs.finish(name, f"{base} parallel.pp=2 parallel.stage_layers=[1,3]", ranks=2)
    check_rows(runs, name, whole)
    check_near(runs, name, whole, relative=1e-9, state=1e-8)
