"""The collectives of a step, counted, are those of the closed formulas: an extra one is a failing test."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from models.flops import parameters
from parallel.config import Compress, Dtype
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.counter import CollectiveCounter, Key
from parallel.planning.traffic import Batch, Traffic, traffic
from tests.parity.cases import LENGTH, SEQUENCES, Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import EXPERT_PARALLEL, MAIN, OPTIONS, TENSOR, layout
from tests.ranks import run_ranks
from training.config import Config
from training.resolve import data_ranks
from training.step import Step

pytestmark = pytest.mark.torch211

Counts = dict[Key, tuple[int, int]]  # number and bytes of whole buffers
Place = tuple[int, int, int]  # along tp, dp_shard and pp

FEWER = [  # with one accumulation
    *OPTIONS,
    layout(4, "parallel=ddp parallel.bucket_cap_mb=0.03"),
    layout(4, "parallel=zero1 parallel.reshard_after_forward=2"),
    layout(4, "parallel=fsdp2 parallel.reshard_after_forward=1"),
    layout(4, "parallel=hsdp parallel.reshard_after_forward=2 parallel.reshard_after_backward=false", 2),
    layout(4, "parallel=hsdp parallel.reduce=micro_batch parallel.reshard_after_forward=false", 2),
]
TENSOR_LAYOUTS = [
    *[of for of in TENSOR if of.ranks <= 4],
    layout(4, "parallel=fsdp2_tp parallel.reduce=step"),
    layout(2, "parallel=fsdp2 parallel.dp_shard=1 parallel.tp=2"),
]
RECOMPUTED = [
    layout(2, f"parallel={spread} activations={mode}")
    for spread in ("fsdp2", "tp", "fsdp2 parallel.dp_shard=1 parallel.tp=2")
    for mode in ("full", "selective", "segments", "every_n")
]
CONTEXT = [
    *[layout(4, f"parallel=fsdp2 parallel.cp=2 parallel.context={kind}") for kind in ("gather", "ring", "ulysses")],
    *[layout(2, f"parallel.cp=2 parallel.context={kind} activations=full") for kind in ("gather", "ring", "ulysses")],
    *[layout(4, f"parallel.cp=4 parallel.context={kind} activations=segments") for kind in ("gather", "ring")],
    layout(4, "parallel=tp parallel.tp=2 parallel.cp=2"),
    layout(4, "parallel=zero1 parallel.tp=2 parallel.cp=2 parallel.context=ulysses activations=selective"),
    layout(4, "parallel=ddp parallel.cp=2 parallel.context=ring"),
]
APART = [
    *[of for of in EXPERT_PARALLEL if of.ranks <= 4],
    layout(2, "parallel.cp=2 activations=full"),  # on the ranks of their layer
    layout(2, "parallel=tp activations=full"),
    layout(4, "parallel=zero1 parallel.ep=2 activations=every_n"),
    layout(4, "parallel=fsdp2 parallel.ep=2 parallel.reshard_after_forward=2"),
    layout(4, "parallel=fsdp2 parallel.ep=2 parallel.reshard_after_forward=1"),
    layout(4, "parallel=fsdp2 parallel.ep=2 parallel.reshard_after_backward=false activations=offload"),
    layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=2 parallel.reduce=step activations=full"),
    layout(4, "parallel=tp parallel.tp=2 parallel.cp=2 parallel.context=ring activations=selective"),
    layout(4, "parallel=ddp parallel.tp=2 parallel.cp=2"),
    layout(4, "parallel=hsdp parallel.ep=2", 2),
    layout(4, "parallel=hsdp parallel.tp=2 activations=segments", 2),
]
MIXED = [layout(4, "parallel=ddp"), layout(4, "parallel=fsdp2_tp"), layout(2, "parallel=tp")]
LOW = [
    layout(4, "parallel=ddp"),
    layout(4, "parallel=fsdp2"),
    layout(4, "parallel=hsdp", 2),
    layout(2, "parallel=zero1"),
]
LOW_TENSOR = [layout(2, "parallel=tp"), layout(4, "parallel=ddp parallel.tp=2")]
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
    LOW_TENSOR.append(layout(4, "parallel=fsdp2_tp"))  # torch 2.11 sums over tp in the compute dtype

FAMILIES = [
    (layout(2, "parallel=tp"), "olmo"),
    (layout(2, "parallel=tp activations=full"), "olmo"),
    (layout(2, "parallel=tp activations=segments"), "olmo"),
    (layout(2, "parallel=tp activations=selective"), "gemma"),
    (layout(2, "parallel=tp"), "speedrun"),
    (layout(2, "parallel=fsdp2"), "speedrun"),
    (layout(2, "parallel=ddp"), "qwen2"),
    (layout(4, "parallel=fsdp2_tp"), "olmo"),
    (layout(4, "parallel=fsdp2_tp activations=segments"), "gemma"),
    (layout(4, "parallel=fsdp2_tp"), "llama"),
    (layout(4, "parallel=ddp parallel.tp=2"), "qwen3"),
    (layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"), "qwen3"),
    (layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ring"), "olmo"),
    (layout(4, "parallel=tp parallel.tp=2 parallel.cp=2"), "gemma"),
    (layout(2, "parallel=fsdp2 parallel.ep=2"), "qwen3 moe"),
    (layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4 activations=full"), "qwen3 moe"),
]

# Narrow vectors over tp, keys and values of other widths over cp; embedding, head and blocks of further tokens.
DEEPSEEK = [
    (layout(2, "parallel=tp"), "v3"),
    (layout(2, "parallel=tp activations=full"), "alone"),
    (layout(2, "parallel=tp activations=segments"), "one further"),
    (layout(2, "parallel=tp activations=selective"), "v3"),
    (layout(2, "parallel=ddp parallel.bucket_cap_mb=0.03"), "dense, tied"),
    (layout(2, "parallel=fsdp2 activations=full"), "one further"),
    (layout(4, "parallel=fsdp2_tp"), "dense, tied"),
    (layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4 activations=full"), "v3"),
    (layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=gather"), "v3"),
    (layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ring activations=full"), "dense, tied"),
    (layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"), "one further"),
    (layout(4, "parallel=tp parallel.tp=2 parallel.cp=2 activations=full"), "v3"),
]

# Schedules with one stage a rank, two and four, one way and there and back; each way of data parallelism in between.
LOOPS = "parallel.schedule=interleaved_1f1b"
PIPELINES = [
    (layout(2, "parallel=pp"), 3, "streams for pp"),
    (layout(2, f"parallel=pp {LOOPS}"), 4, "streams for pp"),
    (layout(2, "parallel=pp parallel.schedule=gpipe activations=full"), 2, "tied for pp"),
    (layout(4, "parallel=pp"), 6, "tied for pp"),
    (layout(4, f"parallel=pp {LOOPS}"), 4, "streams for pp"),
    (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2"), 3, "streams for pp"),
    (layout(4, "parallel=fsdp2 parallel.pp=2"), 3, "streams for pp"),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=gpipe"), 3, "untied for pp"),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.reshard_after_forward=false"), 3, "tied for pp"),
    (layout(4, f"parallel=fsdp2 parallel.pp=2 {LOOPS} activations=segments"), 6, "streams for pp"),
    (layout(4, f"parallel=fsdp2 parallel.pp=2 {LOOPS} parallel.stages_per_rank=4"), 2, "streams for pp"),
    (layout(4, "parallel=zero1 parallel.pp=2"), 3, "untied for pp"),
    (layout(4, "parallel=ddp parallel.pp=2"), 3, "streams for pp"),
    (layout(4, f"parallel=pp parallel.pp=2 parallel.tp=2 {LOOPS} activations=segments"), 2, "tied for pp"),
    (layout(4, "parallel=pp parallel.pp=2 parallel.cp=2"), 3, "streams for pp"),
    (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 activations=every_n"), 3, "streams for pp"),
]
APART_PIPELINES = [
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.ep=2"), 3),
    (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 activations=full"), 3),
    (layout(4, "parallel=pp parallel.pp=2 parallel.cp=2 parallel.ep=2"), 3),
    (layout(4, f"parallel=fsdp2 parallel.pp=2 parallel.ep=2 {LOOPS} activations=segments"), 2),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.tp=2 parallel.schedule=gpipe"), 3),
]
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):  # torch 2.11 cannot over gloo
    APART_PIPELINES.append((layout(4, "parallel=zero1 parallel.pp=2 parallel.ep=2 parallel.schedule=zbv"), 6))
    PIPELINES += [
        (layout(2, "parallel=pp parallel.schedule=zbv"), 3, "streams for pp"),
        (layout(4, "parallel=pp parallel.schedule=zbv"), 6, "streams for pp"),
        (layout(4, "parallel=zero1 parallel.pp=2 parallel.schedule=zbv"), 3, "tied for pp"),
        (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 parallel.schedule=zbv"), 3, "streams for pp"),
    ]


def trained(tied: str, untied: str) -> dict[int, Training]:
    """What is trained with each accumulation."""
    return {1: Training(tied, "sgd", "fp64"), 3: Training(untied, "adamw", "fp32")}


CASES = [
    *[Case(of, n, model) for of in MAIN if of.ranks > 1 for n, model in trained("tied", "untied").items()],
    *[Case(of, 3, Training("untied", "sgd", "fp32")) for of in FEWER],
    *[Case(of, n, model) for of in TENSOR_LAYOUTS for n, model in trained("grouped heads", "untied for tp").items()],
    *[Case(of, 3, Training("tied for tp", "sgd", "fp32")) for of in RECOMPUTED],
    *[Case(of, 3, Training("streams for tp", "sgd", "fp32")) for of in [*MIXED, *RECOMPUTED[:4]]],
    *[Case(of, 3, Training("grouped heads", "sgd", "fp32")) for of in CONTEXT],
    *[Case(of, 3, Training("untied", "sgd", "bf16")) for of in LOW],
    *[Case(of, n, Training("experts", "sgd", "bf16")) for of in LOW for n in (1, 3)],
    *[Case(of, 3, Training("three matrices", "sgd", "bf16")) for of in LOW_TENSOR],
    *[Case(of, 3, Training(family, "sgd", "fp32")) for of, family in FAMILIES],
    *[Case(of, 3, Training(f"deepseek {model}", "sgd", "fp32")) for of, model in DEEPSEEK],
    Case(layout(2, "parallel=tp"), 3, Training("olmo", "sgd", "bf16")),
    *[Case(of, 3, Training("experts for ep", "sgd", "fp32")) for of in APART],
    *[Case(of, 1, Training("experts for ep by the step before", "sgd", "bf16")) for of in APART[:7]],
]
PIPELINE_CASES = [
    *[Case(of, number, Training(model, "sgd", "fp32")) for of, number, model in PIPELINES],
    Case(layout(2, "parallel=pp"), 3, Training("streams for pp", "sgd", "bf16")),
    Case(layout(2, "parallel=pp"), 3, Training("speedrun", "sgd", "fp32")),
    Case(layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 activations=full"), 3, Training("olmo", "sgd", "fp32")),
    Case(layout(4, "parallel=fsdp2 parallel.pp=2"), 3, Training("experts for pp", "sgd", "fp32")),
    Case(layout(4, "parallel=fsdp2 parallel.pp=2"), 3, Training("deepseek v3", "sgd", "fp32")),
    Case(layout(4, "parallel=pp parallel.pp=2 parallel.tp=2"), 3, Training("deepseek one further", "sgd", "fp32")),
    Case(layout(4, "parallel=pp parallel.pp=2 parallel.cp=2"), 3, Training("deepseek dense, tied", "sgd", "fp32")),
    *[Case(of, number, Training("experts for pp", "sgd", "fp32")) for of, number in APART_PIPELINES],
]


def configured(case: Case) -> Config:
    config = config_of(case)
    if case.layout in LOW and case.training.precision == "bf16":
        config.precision.reduce_dtype = Dtype.bf16
    if case.training.model.startswith("experts for") or case.training.model in ("qwen3 moe", "deepseek v3"):
        config.model.moe.forced_balance = True  # the formulas are for even loads
    if case.training.model == "experts for ep":
        config.model.moe.capacity_factor = 1.5  # routers see whole sequences for this, and for their loss
    return config


def count(cases: list[tuple[Case, Config]]) -> list[tuple[Counts, Place]]:
    """On a rank: what each case's step is seen to do, and the rank's place."""
    start_process_group(CPU, timeout_seconds=60)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    views: list[DeviceMesh] = []
    try:
        return [count_step(config, mesh_of(config, meshes), views) for _, config in cases]
    finally:
        dist.destroy_process_group()


def count_step(config: Config, mesh: DeviceMesh | None, views: list[DeviceMesh]) -> tuple[Counts, Place]:
    """views: of all cases until now, among which torch may take an equal one."""
    assert mesh is not None and isinstance(config.micro_batch, int)
    spread, watched = build(config, mesh)
    step = Step(spread, mesh, watched.optimizer, config.optimizer.clip)
    rank, ranks = data_coordinate(mesh, config.parallel.cp)
    micro_batches: list[dict[str, Any]] = [
        {"tokens": micro.tokens, "labels": micro.labels}
        for micro in slices(batches()[0], rank, ranks, config.micro_batch)
    ]
    # After its first step DDP lays out its buckets anew; in it a pipeline connects its ranks.
    for _ in range(2 if config.parallel.torch_ddp else int(config.parallel.pp > 1)):
        step(micro_batches, 1, 0.01)
    views += spread.views
    with CollectiveCounter(mesh, *views) as counter:
        step(micro_batches, 1, 0.01)
    place = mesh.get_local_rank("tp"), mesh.get_local_rank("dp_shard"), mesh.get_local_rank("pp")
    return {key: (number, counter.buffer_bytes[key]) for key, number in counter.number.items()}, place


def formula(config: Config, place: Place = (0, 0, 0)) -> list[Traffic]:
    assert isinstance(config.micro_batch, int)
    batch = Batch(
        config.micro_batch, SEQUENCES // data_ranks(config) // config.micro_batch, LENGTH // config.parallel.cp
    )
    precision = config.precision
    dtypes = precision.dtype, precision.reduce_dtype
    kept, sums = config.activations, config.optimizer.sums
    return traffic(config.model, config.parallel, *dtypes, batch, kept, *place, compression=sums)


def summed(entries: list[Traffic]) -> Counts:
    return added(
        ((entry.axis, entry.ranks, entry.collective.name), entry.number, entry.buffer_bytes) for entry in entries
    )


def of_groups(counts: Counts, ranks: int) -> Counts:
    """The same where axes that all ranks are along, which have one group, are one."""
    return added((("all" if of == ranks else axis, of, kind), *found) for (axis, of, kind), found in counts.items())


def added(found: Iterable[tuple[Key, int, int]]) -> Counts:
    number: Counter[Key] = Counter()
    size: Counter[Key] = Counter()
    for key, times, size_bytes in found:
        number[key] += times
        size[key] += size_bytes
    return {key: (number[key], size[key]) for key in number}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_makes_the_collectives_of_the_formulas_and_no_other(ranks: int, quick: bool) -> None:
    """Each sixth case, or the others."""
    some = [case for place, case in enumerate(CASES) if (place % 6 == 0) is quick]
    assert differing(ranks, some) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_of_a_pipeline_sends_what_the_formulas_say(ranks: int, quick: bool) -> None:
    """Each fifth case, or the others."""
    some = [case for place, case in enumerate(PIPELINE_CASES) if (place % 5 == 0) is quick]
    assert differing(ranks, some) == []


def differing(ranks: int, some: list[Case]) -> list[str]:
    """Of the cases with so many ranks: where a rank does other than planned."""
    cases = [(case, configured(case)) for case in some if case.layout.ranks == ranks]
    different = []
    for of_rank in run_ranks(ranks, count, cases, timeout=200):
        for (case, config), (counted, place) in zip(cases, of_rank, strict=True):
            seen, planned = of_groups(counted, ranks), of_groups(summed(formula(config, place)), ranks)
            different += [f"{case}: {place} counted {seen}, planned {planned}"] if seen != planned else []
    return different


def test_compressed_gradients() -> None:
    cases = []
    for kind in (Compress.bf16, Compress.fp16, Compress.powersgd):
        case = Case(layout(2, "parallel=ddp parallel.bucket_cap_mb=0.03"), 3, Training("untied", "sgd", "fp32"))
        config = config_of(case)
        config.optimizer.compression, config.optimizer.powersgd_rank = kind, 3
        config.optimizer.powersgd_start_step = 2
        cases.append((case, config))
    for of_rank in run_ranks(2, count, cases):
        for (_, config), (counted, place) in zip(cases, of_rank, strict=True):
            assert counted == summed(formula(config, place)), config.optimizer.compression
    exact, rounded, _, factors = (formula(config) for _, config in [(None, config_of(case)), *cases])
    (whole,), (half,) = ([entry for entry in of if entry.what == "gradients"] for of in (exact, rounded))
    assert whole.buffer_bytes == 2 * half.buffer_bytes
    assert sum(entry.buffer_bytes for entry in factors) < half.buffer_bytes / 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_sends_almost_twice_its_gradient(ranks: int) -> None:
    config = config_of(Case(layout(ranks, "parallel=ddp"), 3, Training("tied", "sgd", "fp32")))
    (gradients,) = (entry for entry in formula(config) if entry.what == "gradients")
    assert gradients.sent_bytes == 2 * (ranks - 1) / ranks * 4 * parameters(config.model)
