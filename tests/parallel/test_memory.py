"""The bytes that plans give a rank are those that it holds."""

import gc
import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import (
    Attention,
    Balance,
    FeedForward,
    Latent,
    ModelConfig,
    MoE,
    Norm,
    NormPlace,
    Position,
    QKNorm,
    Score,
)
from models.decoder import Decoder
from models.shapes import block_shapes, in_router
from parallel.activations import keep_activations
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute, Schedule
from parallel.local import is_sharded, local
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.activations import How, kept_bytes, peak_bytes, running_bytes, waiting_bytes
from parallel.planning.memory import held_shapes, memory, state_of
from parallel.planning.stages import Stage, held_stages, order_of
from parallel.planning.traffic import Batch
from parallel.precision import compute_dtype
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import EXPERT_PARALLEL, MAIN, TENSOR, layout
from tests.ranks import run_ranks
from training.config import Config, OptimizerKind

LAYOUTS = [of for of in [*MAIN, *TENSOR] if of.ranks in (1, 4)]
MODELS = {False: Training("untied", "adamw", "fp64"), True: Training("tied for tp", "adamw", "fp32")}
STREAMS = Training("streams for pp", "adamw", "fp32")
PIPELINES = [
    Case(layout(4, "parallel=pp"), 6, STREAMS),
    Case(layout(4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=interleaved_1f1b"), 2, STREAMS),
    Case(layout(4, "parallel=pp parallel.pp=2 parallel.tp=2"), 2, STREAMS),
]
EXPERTS = [
    Case(layout(1, "parallel=single"), 1, Training("experts for ep", "adamw", "fp32")),
    *[Case(of, 1, Training("experts for ep", "adamw", "fp32")) for of in EXPERT_PARALLEL if of.ranks == 4],
    Case(layout(4, "parallel=fsdp2 parallel.tp=2"), 1, Training("experts for ep", "sgd", "fp32")),
    Case(layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=2"), 1, Training("qwen3 moe", "adamw", "fp32")),
    Case(layout(4, "parallel=fsdp2 parallel.pp=2 parallel.ep=2"), 3, Training("experts for pp", "adamw", "fp32")),
]
DEEPSEEK = [
    Case(layout(4, f"parallel={spread}"), 3, Training(f"deepseek {model}", "sgd", "fp32"))
    for spread, model in [
        ("fsdp2 parallel.tp=2 parallel.ep=2", "v3"),
        ("fsdp2 parallel.pp=2", "one further"),
        ("pp parallel.pp=2 parallel.tp=2", "dense, tied"),
    ]
]
CASES = [*[Case(of, 1, MODELS["tp" in str(of)]) for of in LAYOUTS], *PIPELINES, *EXPERTS, *DEEPSEEK]

# Bytes of parameters, gradients, moments; place along dp_shard, tp, expert_shard and pp.
Held = tuple[int, int, int, tuple[int, int, int, int]]


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
    spread, step = build(config, mesh)
    mine = slices(batches()[0], *data_coordinate(mesh, config.parallel.cp), config.micro_batch)
    step.backward([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], 1)
    moments = [t for name, t in step.optimizer.tensors().items() if not name.endswith(".step")]
    parameters = list(spread.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    [expert_rank] = [of.get_local_rank("expert_shard") for of in spread.views if "expert_shard" in names(of)] or [0]
    shard, tensor, stage = (0, 0, 0) if mesh is None else map(mesh.get_local_rank, ("dp_shard", "tp", "pp"))
    return size(parameters), size(gradients), size(moments), (shard, tensor, expert_rank, stage)


def names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def size(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.mark.torch211
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("share", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_rank_holds_the_bytes_of_the_plan(ranks: int, share: int) -> None:
    """The cases in two shares, every second in each."""
    configs = [config_of(case) for case in CASES if case.layout.ranks == ranks][share::2]
    for of in [of for of in configs if of.model.moe.experts > 0 and of.parallel.pp == 1]:
        # Experts that do not divide by the ranks that share out their state.
        if 6 % of.parallel.ep == 6 % of.model.moe.groups == 0:
            configs.append(replace(of, model=replace(of.model, moe=replace(of.model.moe, experts=6))))
    for of_rank in run_ranks(ranks, hold, configs, timeout=120):
        for config, (parameters, gradients, moments, place) in zip(configs, of_rank, strict=True):
            each = 8 if config.precision.dtype is Dtype.fp64 else 4
            *ranks_along, pipeline_rank = place
            held_here = [
                state_of(config.model, held_shapes(config.model, config.parallel, stage, *ranks_along))
                for stage in held_stages(config.model, config.parallel, pipeline_rank)
            ]
            per_value = 2 if config.optimizer.kind is OptimizerKind.adamw else 1
            planned = [
                each * sum(of.parameters for of in held_here),
                each * sum(of.gradients for of in held_here),
                each * per_value * sum(of.learned for of in held_here),
            ]
            assert [parameters, gradients, moments] == planned, (config.parallel, place)


def test_the_first_rank_is_the_one_that_is_planned() -> None:
    config = config_of(Case(MAIN[5], 1, MODELS[False]))
    batch, kept = Batch(1, 1, 16), config.activations
    found = memory(config.model, config.parallel, Dtype.fp64, Dtype.fp64, batch, kept, moments=2)
    [stage] = held_stages(config.model, config.parallel, 0)
    most = 8 * state_of(config.model, held_shapes(config.model, config.parallel, stage)).parameters
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
    assert found == batch * length * kept_bytes(config, How(activations, dtype))[0]


ROUTED: list[dict[str, Any]] = [
    {},
    {"score": Score.sigmoid, "balance": Balance.sequence, "z_loss": 0.01, "scale": 2.5, "shared": 1},
    {"normalize": False, "capacity_factor": 2.0, "balance": Balance.step},
]


@pytest.mark.torch211
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16, Dtype.fp64])
@pytest.mark.parametrize(
    ("ffn", "keys"), [*[(FeedForward.gelu, keys) for keys in ROUTED], (FeedForward.swiglu, {"shared": 2})], ids=str
)
@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full, Recompute.selective], ids=lambda mode: mode.name)
def test_blocks_with_experts_keep_what_the_formula_says(
    mode: Recompute, ffn: FeedForward, keys: dict[str, Any], dtype: Dtype
) -> None:
    """But for a few numbers of each layer and sequence. The first block has none."""
    batch, length = 2, 64
    moe = MoE(experts=8, top_k=3, dim=32, dense_layers=1, **keys)
    config = ModelConfig(layers=3, dim=48, heads=4, vocab_size=1, bias=False, ffn=ffn, moe=moe)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if not in_router(name):
            parameter.data = parameter.data.to(compute_dtype(dtype))
    if dtype is Dtype.fp64:
        model.to(torch.float64)
    activations = ActivationsConfig(mode=mode)
    keep_activations(model, activations, CPU, apart=False)
    x = torch.randn(batch, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    with Alive() as alive:
        after = model.walk(tuple(model.blocks.values()), (x,), [None] * 3, positions=None, documents=None)
    found = x.nbytes + alive.bytes_without([*model.parameters(), *after])
    assert found == pytest.approx(batch * length * kept_bytes(config, How(activations, dtype))[0], rel=0.01)


class FusedNorm(torch.autograd.Function):
    """Keeps what the kernel of a GPU does; that of a CPU is made of several operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, root)
        found = (wide * root).to(x.dtype)
        return found if weight is None else found * weight


MODERN: dict[str, Any] = {
    "norm": Norm.rmsnorm,
    "bias": False,
    "position": Position.rotary,
    "ffn": FeedForward.swiglu,
    "kv_heads": 2,
}
LATENT = MODERN | {"kv_heads": None, "latent": Latent(kv_rank=14, q_rank=18, nope_dim=8, rope_dim=4, value_dim=12)}
NARROW_VALUES = {"latent": Latent(kv_rank=14, nope_dim=8, rope_dim=4, value_dim=5)}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": MODERN,
    "three matrices": MODERN | {"fused_qkv": False, "head_dim": 8},
    "qwen3": MODERN | {"qk_norm": QKNorm.head, "fused_qkv": False, "head_dim": 8},
    "qwen3, fused": MODERN | {"qk_norm": QKNorm.head},
    "olmo": MODERN | {"qk_norm": QKNorm.all, "norm_place": NormPlace.after, "window": 6},
    "olmo, three matrices": MODERN | {"qk_norm": QKNorm.all, "norm_place": NormPlace.after, "fused_qkv": False},
    "gemma": MODERN
    | {"ffn": FeedForward.geglu, "norm_place": NormPlace.both, "attention_softcap": 2.0, "fused_qkv": False},
    "gemma, fused": MODERN | {"norm_place": NormPlace.both, "attention_softcap": 2.0, "kv_heads": 4},
    "speedrun": MODERN
    | {"ffn": FeedForward.relu2, "norm_weight": False, "qk_norm": QKNorm.head, "kv_heads": 4, "window": 6},
    "layer norms": {"norm_place": NormPlace.both},
    "latent": LATENT,  # values as wide as keys: the fused kernel of a CPU takes no others
    "latent, values filled up": LATENT | NARROW_VALUES | {"attention": Attention.flash},
    "latent, bent": LATENT | NARROW_VALUES | {"attention_softcap": 2.0},
}


@pytest.mark.torch211
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full, Recompute.selective], ids=lambda mode: mode.name)
def test_blocks_of_families_keep_what_the_formula_says(
    mode: Recompute, family: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one sequence, since all those of a micro-batch have the same angles and masks."""
    monkeypatch.setattr(torch.nn.functional, "rms_norm", FusedNorm.apply)
    length = 16
    config = ModelConfig(layers=3, dim=48, heads=4, vocab_size=1, **FAMILIES[family])
    model = Decoder(config).to(compute_dtype(dtype))
    activations = ActivationsConfig(mode=mode)
    keep_activations(model, activations, CPU, apart=False)
    x = torch.randn(1, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    with Alive() as alive:
        after = model.walk(tuple(model.blocks.values()), (x,), [None] * 3, positions=None, documents=None)
    found = x.nbytes + alive.bytes_without([x, *model.parameters(), *after])
    assert found == length * kept_bytes(config, How(activations, dtype, length=length))[0]


class Bilinear(torch.nn.Module):
    """A part of a user's own that says what it keeps."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Linear(config.dim, 80, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(80, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.down(self.left(x) * self.right(x))
        return given

    def kept_bytes(self, value_bytes: int, tp: int) -> float:
        return (self.left.in_features + 3 * self.left.out_features / tp) * value_bytes


@pytest.mark.torch211
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full], ids=lambda mode: mode.name)
def test_a_part_of_ones_own_keeps_what_it_says(mode: Recompute, dtype: Dtype) -> None:
    length = 16
    parts = {"feedforward": {"_target_": f"{__name__}.Bilinear"}}
    config = ModelConfig(layers=3, dim=48, heads=4, vocab_size=1, parts=parts)
    model = Decoder(config).to(compute_dtype(dtype))
    activations = ActivationsConfig(mode=mode)
    keep_activations(model, activations, CPU, apart=False)
    x = torch.randn(1, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    with Alive() as alive:
        after = model.walk(tuple(model.blocks.values()), (x,), [None] * 3, positions=None, documents=None)
    found = x.nbytes + alive.bytes_without([x, *model.parameters(), *after])
    kept, again = kept_bytes(config, How(activations, dtype))
    assert found == length * kept
    given = (48 + 3 * 80) * x.element_size()
    ours = kept_bytes(replace(config, parts={}, ffn_dim=1), How(ActivationsConfig(mode=Recompute.none), dtype))[0] / 3
    assert (kept / 3 if mode is Recompute.none else kept / 3 + again) == ours - (48 + 2) * x.element_size() + given
    assert kept_bytes(config, How(activations, dtype, ParallelConfig(tp=2)))[0] < kept


def activations(mode: Recompute, **keys: Any) -> float:
    """Bytes for a token of a model of 9 blocks in bf16, with hardly a vocabulary."""
    model = ModelConfig(layers=9, dim=64, heads=4, vocab_size=1, vocab_multiple=1)
    everything = Stage(0, range(model.layers), True, True, 0)
    return running_bytes(model, everything, How(ActivationsConfig(mode=mode, **keys), Dtype.bf16))


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
    planned = batch * length * waiting_bytes(config, stage, How(ActivationsConfig(mode=Recompute.none), dtype))
    assert handed_on is not None and found == pytest.approx(planned, rel=0.01)


@pytest.mark.torch211
@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full], ids=lambda mode: mode.name)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16])
def test_further_tokens_keep_what_the_formula_says(dtype: Dtype, number: int, mode: Recompute) -> None:
    """But for the numbers a token of the last norms, and what is whole of the loss."""
    length = 64
    config = ModelConfig(layers=3, dim=96, heads=4, vocab_size=128, position=Position.rotary, mtp=number)
    stage, activations = Stage(1, range(2, 3), False, True, 1), ActivationsConfig(mode=mode)
    model = Decoder(config, stage.layers, (False, True), shares=False).to(compute_dtype(dtype))
    keep_activations(model, activations, CPU, apart=False)
    x = torch.randn(1, length, config.dim, dtype=compute_dtype(dtype), requires_grad=True)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with Alive() as alive:
        loss = model(x, tokens=tokens, labels=tokens)
    found = x.nbytes + alive.bytes_without(model.parameters())
    assert isinstance(loss, Tensor)
    assert found == pytest.approx(length * waiting_bytes(config, stage, How(activations, dtype)), rel=0.01)


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
