"""The bytes that plans give a rank are those that it holds."""

import gc
import math
import weakref
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import ModelConfig
from models.decoder import Decoder
from models.shapes import block_shapes
from parallel.activations import keep_activations
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute, Schedule
from parallel.local import is_sharded, local
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.activations import kept_bytes, peak_bytes, running_bytes, waiting_bytes
from parallel.planning.memory import held_values, memory
from parallel.planning.stages import Stage, order_of
from parallel.planning.traffic import Batch
from parallel.precision import compute_dtype
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import MAIN, TENSOR, layout
from tests.ranks import run_ranks
from training.config import Config

LAYOUTS = [of for of in [*MAIN, *TENSOR] if of.ranks in (1, 4)]
MODELS = {False: Training("untied", "adamw", "fp64"), True: Training("tied for tp", "adamw", "fp32")}
STREAMS = Training("streams for pp", "adamw", "fp32")
PIPELINES = [
    Case(layout(4, "parallel=pp"), 6, STREAMS),
    Case(layout(4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=interleaved_1f1b"), 2, STREAMS),
    Case(layout(4, "parallel=pp parallel.pp=2 parallel.tp=2"), 2, STREAMS),
]
CASES = [*[Case(of, 1, MODELS["tp" in str(of)]) for of in LAYOUTS], *PIPELINES]

Held = tuple[int, int, int, tuple[int, int, int]]  # bytes of parameters, gradients, moments; place: dp_shard, tp, pp


def hold(configs: list[Config]) -> list[Held]:
    start_process_group(CPU, timeout_seconds=60)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    try:
        return [held(config, mesh_of(config, meshes)) for config in configs]
    finally:
        dist.destroy_process_group()


def held(config: Config, mesh: DeviceMesh | None) -> Held:
    """What a rank has after a backward pass."""
    assert isinstance(config.micro_batch, int)
    _, step = build(config, mesh)
    mine = slices(batches()[0], *data_coordinate(mesh, config.parallel.cp), config.micro_batch)
    step.backward([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], 1)
    moments = [t for name, t in step.optimizer.tensors().items() if not name.endswith(".step")]
    gradients = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
    place = (0, 0, 0) if mesh is None else tuple(map(mesh.get_local_rank, ("dp_shard", "tp", "pp")))
    return size(step.parameters), size(gradients), size(moments), cast(tuple[int, int, int], place)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.mark.torch211
@pytest.mark.parametrize("ranks", [1, 4])
def test_each_rank_holds_the_bytes_of_the_plan(ranks: int) -> None:
    configs = [config_of(case) for case in CASES if case.layout.ranks == ranks]
    for of_rank in run_ranks(ranks, hold, configs, timeout=120):
        for config, (parameters, gradients, moments, place) in zip(configs, of_rank, strict=True):
            dtype = config.precision.dtype
            planned = held_values(config.model, config.parallel, *place) * (8 if dtype is Dtype.fp64 else 4)
            assert (parameters, gradients, moments) == (planned, planned, 2 * planned), (config.parallel, place)


def test_the_first_rank_is_the_one_that_is_planned() -> None:
    config = config_of(Case(MAIN[5], 1, MODELS[False]))
    batch, kept = Batch(1, 1, 16), config.activations
    found = memory(config.model, config.parallel, Dtype.fp64, Dtype.fp64, batch, kept, moments=2)
    most = held_values(config.model, config.parallel, shard_rank=0) * 8
    assert (found.parameters, found.gradients, found.optimizer) == (most, most, 2 * most)
    assert found.total > found.state == 4 * most


class Alive(TorchDispatchMode):
    """Knows every storage that was made while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.made.append(weakref.ref(value.untyped_storage()))
        return result

    def bytes_without(self, others: Iterable[Tensor]) -> int:
        """Of the storages that are still there, but for those of these tensors."""
        gc.collect()
        known = {tensor.untyped_storage().data_ptr() for tensor in others}
        there = {storage.data_ptr(): storage.nbytes() for made in self.made if (storage := made()) is not None}
        return sum(size for address, size in there.items() if address not in known)


MODES = [Recompute.none, Recompute.full, Recompute.selective, Recompute.segments, Recompute.every_n]
SHAPES: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2, "ffn_dim": 50, "bias": False},
    {"kv_heads": 1, "fused_qkv": False},
]


@pytest.mark.torch211
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16, Dtype.fp64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_blocks_keep_what_the_formula_says(mode: Recompute, shape: dict[str, Any], dtype: Dtype) -> None:
    batch, length = 2, 16
    config = ModelConfig(layers=5, dim=48, heads=4, vocab_size=1, **shape)
    model = Decoder(config).to(compute_dtype(dtype))
    activations = ActivationsConfig(mode=mode)
    keep_activations(model, activations, CPU, apart=False)
    x = torch.randn(batch, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    with Alive() as alive:
        after = model.walk(tuple(model.blocks.values()), (x,), [None] * 5, positions=None, documents=None)
    found = x.nbytes + alive.bytes_without([*model.parameters(), *after])
    assert found == batch * length * kept_bytes(config, activations, dtype)[0]


def activations(mode: Recompute, **keys: Any) -> float:
    """Bytes for a token of a model of 9 blocks in bf16, with hardly a vocabulary."""
    model = ModelConfig(layers=9, dim=64, heads=4, vocab_size=1, vocab_multiple=1)
    everything = Stage(0, range(model.layers), True, True, 0)
    return running_bytes(model, everything, ActivationsConfig(mode=mode, **keys), Dtype.bf16)


def test_each_mode_keeps_what_it_is_for() -> None:
    stream, attention, block = 2 * 64, 2 * 64 + 4 * 4, 32 * 64 + 2 * 4 + 4 * 4
    head = 12 + 2 * stream
    full = stream + attention
    selective = full + 2 * (3 * 64 + 64 + 4 * 64 + 64)
    assert activations(Recompute.none) == 9 * block + head
    assert activations(Recompute.auto) == 9 * block + head
    assert activations(Recompute.full) == 9 * full + block - full
    assert activations(Recompute.selective) == 9 * selective + block - selective
    assert activations(Recompute.every_n, every_n=2) == 5 * full + 4 * block + block - full
    assert activations(Recompute.segments) == 3 * stream + 3 * block
    assert activations(Recompute.segments, segments=2) == 2 * stream + 5 * block
    assert activations(Recompute.budget, budget=1.0) == 9 * block + head
    assert activations(Recompute.budget, budget=0.0) == 9 * stream + block - stream
    assert activations(Recompute.offload) == 2 * block + head


@pytest.mark.torch211
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("last", [False, True])
def test_a_stage_keeps_of_a_waiting_micro_batch_what_the_formula_says(last: bool, dtype: Dtype) -> None:
    """But for the numbers a token of the last norm."""
    batch, length = 2, 16
    config = ModelConfig(layers=6, dim=48, heads=4, vocab_size=128, context=length)
    stage = Stage(1, range(4, 6) if last else range(2, 4), False, last, 1)
    model = Decoder(config, stage.layers, (False, last), shares=False).to(compute_dtype(dtype))
    x = torch.randn(batch, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    with Alive() as alive:
        handed_on = model(x, tokens=tokens, labels=tokens)
    found = x.nbytes + alive.bytes_without(model.parameters())
    planned = batch * length * waiting_bytes(config, stage, ActivationsConfig(mode=Recompute.none), dtype)
    assert handed_on is not None and found == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        # Of two stages each: a round of the first, 2 more for each rank behind, and one (Narayanan et al. 2021, 2.2).
        ("interleaved_1f1b", [11, 9, 7, 5]),
        ("zbv", [8, 8, 8, 8]),  # as the first rank of 1f1b, in halves (Qi et al. 2024, Zero Bubble, 5)
    ],
)
def test_micro_batches_that_a_rank_keeps(schedule: str, most: list[int]) -> None:
    parallel = ParallelConfig(pp=4, schedule=Schedule[schedule])
    once, nothing = dict.fromkeys(range(8), 1.0), dict.fromkeys(range(8), 0.0)
    found = [peak_bytes(order_of(parallel, 8, rank), once, once) for rank in range(4)]
    assert found == most
    assert [peak_bytes(order_of(parallel, 8, rank), nothing, once) for rank in range(4)] == [1] * 4


def whole_at_once(configs: list[Config]) -> list[int]:
    """The most blocks of which FSDP2 has the parameters whole at any operation of a step."""
    start_process_group(CPU, timeout_seconds=60)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    found = []
    for config in configs:
        assert isinstance(config.micro_batch, int)
        mesh = mesh_of(config, meshes)
        spread, step = build(config, mesh)
        micro = next(slices(batches()[0], *data_coordinate(mesh, config.parallel.cp), config.micro_batch))
        blocks = list(spread.model.blocks.values())
        with Whole(blocks) as whole:
            step.backward([{"tokens": micro.tokens, "labels": micro.labels}], 1)
        found.append(whole.most)
    dist.destroy_process_group()
    return found


class Whole(TorchDispatchMode):
    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.blocks, self.most = blocks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        self.most = max(self.most, sum(not is_sharded(next(block.parameters())) for block in self.blocks))
        return func(*args, **(kwargs or {}))


def test_segments_gather_their_blocks_at_once() -> None:
    """Of nine blocks, whole at any time: one, three or five; and in the plan those more than with the blocks computed
    again one by one."""
    trained = Training("untied for pp", "sgd", "fp32")
    modes = ["full", "segments", "segments activations.segments=2"]
    configs = [config_of(Case(layout(2, f"parallel=fsdp2 activations={mode}"), 1, trained)) for mode in modes]
    assert run_ranks(2, whole_at_once, configs) == [[1, 3, 5]] * 2

    def copies(config: Config) -> int:
        batch = Batch(1, 1, 16)
        return memory(config.model, config.parallel, Dtype.fp32, Dtype.fp32, batch, config.activations, 1).copies

    block = 4 * sum(math.prod(shape) for shape in block_shapes(configs[0].model, 4).values())
    assert [copies(config) - copies(configs[0]) for config in configs] == [0, 2 * block, 4 * block]
