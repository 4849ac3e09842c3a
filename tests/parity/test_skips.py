"""A step that must not count is skipped by all ranks together and changes nothing, on every kind of layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import data_coordinate, start_process_group
from tests.oracle import Batch
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, WatchedStep, build, gather, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.config import Config

LAYOUTS = [
    layout(2, "parallel=ddp"),
    layout(2, "parallel=zero1"),
    layout(2, "parallel=fsdp2"),
    layout(4, "parallel=hsdp", 2),
    layout(2, "parallel=tp"),
    layout(4, "parallel=fsdp2 parallel.tp=2"),
    layout(2, "parallel=pp"),
    layout(4, "parallel=fsdp2 parallel.pp=2"),
    layout(2, "parallel.cp=2 parallel.context=ring"),
    layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"),
    layout(4, "parallel=pp parallel.pp=2 parallel.cp=2"),
]
OF_EXPERTS = [layout(2, "parallel=fsdp2 parallel.ep=2"), layout(2, "parallel.cp=2 parallel.ep=2")]
CASES = [(layout, "tied for tp") for layout in LAYOUTS] + [(layout, "experts for ep") for layout in OF_EXPERTS]


def steps_with_a_spoiled_one(config: Config) -> dict[str, list[float]]:
    """Good, nothing to predict, not finite on the last rank alone, good. Returns of each step whether it was skipped,
    whether weights and state stayed bitwise equal, the tokens counted and Adam's own count of steps."""
    start_process_group(CPU, timeout_seconds=60)
    mesh = mesh_of(config, {})
    spread, step = build(config, mesh)
    rank, ranks = data_coordinate(mesh, config.parallel.cp)
    good = batches()[0]
    nothing = Batch(good.tokens, torch.full_like(good.labels, -100))
    found: dict[str, list[float]] = {"skipped": [], "unchanged": [], "predicted": [], "steps": []}
    for number, batch in enumerate([good, nothing, good, good]):
        before = everything(step)
        norm = spread.model.norm  # not on the first stage of a pipeline
        hook = norm.register_forward_hook(_spoiled) if number == 2 and rank == ranks - 1 and norm is not None else None
        mine = list(slices(batch, rank, ranks, 1))
        count = sum(int((micro.labels != -100).sum()) for micro in mine)
        result = step([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], count, 0.01)
        if hook is not None:
            hook.remove()
        after = everything(step)
        found["skipped"].append(result.skipped.item())
        found["unchanged"].append(all(torch.equal(after[name], value) for name, value in before.items()))
        found["predicted"].append(result.predicted.item())
        found["steps"].append(next(value.item() for name, value in after.items() if name.endswith(".step")))
    dist.destroy_process_group()
    return found


def _spoiled(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * math.inf


def everything(step: WatchedStep) -> dict[str, Tensor]:
    tensors = dict(step.spread.model.named_parameters()) | step.optimizer.tensors()
    scalars = {name: value.clone() for name, value in tensors.items() if value.ndim == 0}
    return scalars | gather({name: value for name, value in tensors.items() if value.ndim > 0}).values


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_all_ranks_skip_together_and_nothing_changes(layout: Layout, model: str) -> None:
    config = config_of(Case(layout, 3, Training(model, "adamw", "fp64")))
    all_of_them = int((batches()[0].labels != -100).sum())
    for found in run_ranks(layout.ranks, steps_with_a_spoiled_one, config):
        assert found == {
            "skipped": [0, 1, 1, 0],
            "unchanged": [False, True, True, False],
            "predicted": [all_of_them, 0, all_of_them, all_of_them],
            "steps": [1, 1, 1, 2],
        }
