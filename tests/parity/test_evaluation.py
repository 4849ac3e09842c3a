"""An evaluation between steps changes nothing in training, bitwise, on every kind of layout. Its own numbers are in
test_parity."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.mesh import data_coordinate, random_coordinate, start_process_group
from tests.oracle_model import Weights
from tests.parity.cases import LRS, SEED, Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, evaluate, gather, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.config import Config
from training.ranks import Ranks
from training.seeds import seed_step

LAYOUTS = [
    layout(1, "parallel=single"),
    layout(2, "parallel=ddp"),
    layout(2, "parallel=zero1"),
    layout(2, "parallel=fsdp2"),
    layout(2, "parallel=fsdp2 parallel.reshard_after_forward=false"),
    layout(2, "parallel=tp"),
    layout(4, "parallel=ddp parallel.tp=2"),
    layout(2, "parallel=pp"),
    layout(4, "parallel=fsdp2 parallel.pp=2"),
    layout(2, "parallel.cp=2"),
    layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"),
]


def with_and_without(config: Config) -> tuple[Weights, Weights]:
    group = start_process_group(CPU, timeout_seconds=60)
    mesh = mesh_of(config, {})
    weights = trained(config, mesh, Ranks(group), False), trained(config, mesh, Ranks(group), True)
    dist.destroy_process_group()
    return weights


def trained(config: Config, mesh: DeviceMesh | None, ranks: Ranks, evaluated: bool) -> Weights:
    spread, step = build(config, mesh)
    rank, data_ranks = data_coordinate(mesh, config.parallel.cp)
    assert isinstance(config.micro_batch, int)
    for number, batch in enumerate(batches()[:3]):
        mine = list(slices(batch, rank, data_ranks, config.micro_batch))
        if evaluated:
            losses = [evaluate(spread, mesh, ranks, mine) for _ in range(2)]
            assert torch.equal(*losses), "dropout in an evaluation"
        seed_step(SEED, number, random_coordinate(mesh))
        count = sum(int((micro.labels != -100).sum()) for micro in mine)
        step([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], count, LRS[number])
        if evaluated:
            evaluate(spread, mesh, ranks, mine)
    return gather(dict(spread.model.named_parameters())).values


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_are_bitwise_equal_with_and_without_evaluations(layout: Layout) -> None:
    config = config_of(Case(layout, 3, Training("tied for tp", "adamw", "fp32")))
    config.model.dropout = 0.1  # its random numbers must not be used up either
    for without, evaluated in run_ranks(layout.ranks, with_and_without, config):
        assert without.keys() == evaluated.keys()
        for name, value in without.items():
            assert torch.equal(evaluated[name], value), name
