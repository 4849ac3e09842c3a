"""The collectives of a step, counted, are those of the closed formulas: an extra one is a failing test."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.config import Dtype, ParallelConfig
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.counter import CollectiveCounter, Key
from parallel.planning.traffic import Batch, Collective, Traffic, traffic
from tests.parity.cases import LENGTH, Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import MAIN, OPTIONS, layout
from tests.ranks import run_ranks
from training.config import Config
from training.step import Step

pytestmark = pytest.mark.torch211

Counts = dict[Key, tuple[int, int]]  # number and bytes of whole buffers

COUNTED = 2  # the step that is counted: in the first two DDP still lays out its buckets
LAYOUTS = [
    *MAIN,
    *OPTIONS,
    layout(4, "parallel=ddp parallel.bucket_cap_mb=0.03"),
    layout(4, "parallel=zero1 parallel.reshard_after_forward=2"),
    layout(4, "parallel=fsdp2 parallel.reshard_after_forward=1"),
    layout(4, "parallel=hsdp parallel.reshard_after_forward=2 parallel.reshard_after_backward=false", 2),
    layout(4, "parallel=hsdp parallel.reduce=micro_batch parallel.reshard_after_forward=false", 2),
]
MODELS = {1: Training("tied", "sgd", "fp64"), 3: Training("untied", "adamw", "fp32")}
LOW = [
    layout(4, "parallel=ddp"),
    layout(4, "parallel=fsdp2"),
    layout(4, "parallel=hsdp", 2),
    layout(2, "parallel=zero1"),
]
CASES = [
    *[Case(of, times, training) for of in LAYOUTS if of.ranks > 1 for times, training in MODELS.items()],
    *[Case(of, 3, Training("untied", "sgd", "bf16")) for of in LOW],
]


def configured(case: Case) -> Config:
    config = config_of(case)
    if case.training.precision == "bf16":
        config.precision.reduce_dtype = Dtype.bf16
    return config


def count(cases: list[tuple[Case, Config]]) -> list[Counts]:
    """On a rank: what each case's step is seen to do."""
    start_process_group(CPU, timeout_seconds=60)
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    try:
        return [count_step(config, mesh_of(config, meshes)) for _, config in cases]
    finally:
        dist.destroy_process_group()


def count_step(config: Config, mesh: DeviceMesh | None) -> Counts:
    assert mesh is not None and isinstance(config.micro_batch, int)
    spread, watched = build(config, mesh)
    step = Step(spread, mesh, watched.optimizer, config.optimizer.clip)
    rank, data_ranks = data_coordinate(mesh)
    for number, batch in enumerate(batches()[: COUNTED + 1]):
        micro_batches: list[dict[str, Any]] = [
            {"tokens": micro.tokens, "labels": micro.labels}
            for micro in slices(batch, rank, data_ranks, config.micro_batch)
        ]
        if number < COUNTED:
            step(micro_batches, 1, 0.01)
    with CollectiveCounter(mesh) as counter:
        step(micro_batches, 1, 0.01)
    return {key: (number, counter.buffer_bytes[key]) for key, number in counter.number.items()}


def formula(case: Case, config: Config) -> list[Traffic]:
    assert isinstance(config.micro_batch, int)
    batch = Batch(config.micro_batch, case.accumulation, LENGTH)
    return traffic(config.model, config.parallel, config.precision.dtype, config.precision.reduce_dtype, batch)


def summed(entries: list[Traffic]) -> Counts:
    number: Counter[Key] = Counter()
    size: Counter[Key] = Counter()
    for entry in entries:
        key = (entry.axis, entry.ranks, entry.collective.name)
        number[key] += entry.number
        size[key] += entry.buffer_bytes
    return {key: (number[key], size[key]) for key in number}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_makes_the_collectives_of_the_formulas_and_no_other(ranks: int) -> None:
    cases = [(case, configured(case)) for case in CASES if case.layout.ranks == ranks]
    of_ranks = run_ranks(ranks, count, cases, timeout=200)
    expected = {str(case): summed(formula(case, config)) for case, config in cases}
    for counted in of_ranks:
        assert dict(zip(expected, counted, strict=True)) == expected


def test_ddp_sends_its_gradients_almost_twice() -> None:
    case = Case(layout(4, "parallel=ddp"), 3, MODELS[3])
    config = config_of(case)
    model = config.model
    block = 12 * 30 + 30 * 3 * 30 + 30 * 30 + 2 * 30 * 34 + 34 + 0 * model.layers  # 
    gradients = [entry for entry in formula(case, config) if entry.what == "gradients"]
    assert block and gradients
