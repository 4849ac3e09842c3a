"""The statistics of experts in the records of steps."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models.config import ModelConfig, MoE
from models.moe import Router, load_statistics
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh, start_process_group
from tests.ranks import run_ranks
from training.metrics.experts import expert_records
from training.metrics.records import Record

CPU = torch.device("cpu")
# Of three blocks two have experts: 12 tokens to two of four, some of them dropped.
CONFIG = ModelConfig(layers=3, dim=4, vocab_size=7, moe=MoE(experts=4, dense_layers=1, capacity_factor=1.0))
COUNTS = [[6.0, 6.0, 6.0, 6.0], [12.0, 3.0, 9.0, 0.0]]
DROPPED = [0.0, 6.0]


def counted(routers: slice) -> nn.Module:
    model = nn.ModuleList()
    for counts, dropped in list(zip(COUNTS, DROPPED, strict=True))[routers]:
        router = Router(CONFIG)
        router.load.grad, router.dropped.grad = torch.tensor(counts), torch.tensor([dropped])
        model.append(router)
    return model


def expected() -> Record:
    deviation = math.sqrt((6**2 + 3**2 + 3**2 + 6**2) / 4) / 6
    return {
        "expert_load_max": 2.0,
        "expert_load_min": 0.0,
        "expert_load_cv": pytest.approx(deviation / 2),
        "dropped_share": pytest.approx(6 / 24 / 2),
    }


def test_statistics_of_all_blocks() -> None:
    loads = load_statistics(counted(slice(2)))
    assert loads is not None
    assert expert_records([loads], CONFIG, None) == [expected()]
    without = expert_records([loads], replace(CONFIG, moe=MoE(experts=4, dense_layers=1)), None)
    assert without[0].keys() == expected().keys() - {"dropped_share"}
    assert load_statistics(nn.Linear(2, 2)) is None


def on_stages() -> list[Record]:
    """The second of two stages has the second block with experts, the first the other."""
    start_process_group(CPU, timeout_seconds=60)
    mesh = build_mesh(ParallelConfig(pp=2), CPU)
    place = mesh.get_local_rank("pp")
    loads = load_statistics(counted(slice(place, place + 1)))
    assert loads is not None
    records = expert_records([loads, loads], CONFIG, mesh)
    dist.destroy_process_group()
    return records


def test_stages_of_a_pipeline_are_put_together() -> None:
    for records in run_ranks(2, on_stages):
        assert records == [expected(), expected()]
