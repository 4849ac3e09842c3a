"""What a rank has of each parameter, from the degrees alone. No torch here."""

import math
from collections import defaultdict
from dataclasses import replace

from models.config import ModelConfig, QKNorm
from models.shapes import Shapes, in_experts, in_router
from parallel.config import Dtype, ParallelConfig, Reduce, Strategy

INDEX_BYTES = 8  # of the number of an expert, of a row, and of how many tokens an expert gets
BYTES = {Dtype.fp32: 4, Dtype.tf32: 4, Dtype.bf16: 2, Dtype.fp64: 8}

# The dimension along which parallel.tensor.ROWS cut the weight of each module; a bias is cut with its rows.
TENSOR_CUTS = {"qkv": 0, "q": 0, "k": 0, "v": 0, "q_up": 0, "kv_up": 0, "gate": 0, "up": 0, "tokens": 0, "head": 0}
TENSOR_CUTS |= {"out": 1, "down": 1, "table": 1}
NORMS_OF_HEADS = ("q_norm", "k_norm")  # cut where they are of all heads together


def master_bytes(compute: Dtype) -> int:
    """Of a value of the weights, their gradients and the optimizer's state."""
    return 8 if compute is Dtype.fp64 else 4


def tensor_cut(name: str, model: ModelConfig) -> int | None:
    """The dimension along which tensor parallelism cuts a parameter; None: it is whole on each rank."""
    module, own_name = name.split(".")[-2:]
    if module in NORMS_OF_HEADS:
        return 0 if model.qk_norm is QKNorm.all else None
    cut = TENSOR_CUTS.get(module)
    return None if own_name == "bias" and cut == 1 else cut


def cut_parts(model: ModelConfig, layer: int) -> int:
    """Attention, and the feed-forward layer or the shared experts: parts of a block that gather the stream over tp and
    scatter what they add to it."""
    return 1 if model.routed(layer) and model.moe.shared == 0 else 2


def gathered(model: ModelConfig, layer: int) -> list[int]:
    """Widths that a block gathers over tp: of the stream for each of its cut parts; but latent attention gathers narrow
    vectors, and the stream only where queries are made of it."""
    latent, stream = model.latent, [model.dim] * cut_parts(model, layer)
    if latent.kv_rank == 0:
        return stream
    return [model.dim if latent.q_rank is None else latent.q_rank, latent.kv_rank, latent.rope_dim, *stream[1:]]


def part(length: int, ranks: int, rank: int) -> int:
    """Of `length` rows those of one rank, as torch.chunk and DTensor cut: ceil(length / ranks) each while there are
    any."""
    each = math.ceil(length / ranks)
    return min(max(length - rank * each, 0), each)


def tensor_shapes(shapes: Shapes, model: ModelConfig, tp: int, rank: int = 0) -> Shapes:
    """The parameters of one tensor rank before data parallelism cuts them further."""
    found = {}
    for name, shape in shapes.items():
        cut = tensor_cut(name, model)
        found[name] = tuple(part(n, tp, rank) if tp > 1 and place == cut else n for place, n in enumerate(shape))
    return found


def values(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def shard_shapes(shapes: Shapes, shards: int, rank: int = 0) -> Shapes:
    """What FSDP2 leaves one of `shards` ranks: routers whole."""
    return {
        name: (rows if in_router(name) else part(rows, shards, rank), *rest) for name, (rows, *rest) in shapes.items()
    }


def padded_shard(shapes: Shapes, shards: int) -> int:
    """Values of a rank's shard as FSDP2 stores, gathers and reduces it: rows of dimension 0 are padded to a multiple of
    the shards."""
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes.values())


def as_sharded(parallel: ParallelConfig) -> ParallelConfig:
    """The keys of FSDP2 as they are carried out: where it stands in for ddp, copies stay whole in a step (parallel.data
    .Sharded); in a pipeline parameters stay whole from their first backward pass on, and gradients are summed once a
    step (torch's schedules)."""
    if parallel.strategy is Strategy.ddp:
        parallel = replace(parallel, reshard_after_forward=False)
    if parallel.strategy is Strategy.ddp or parallel.pp > 1:
        parallel = replace(parallel, reshard_after_backward=False, reduce=Reduce.step)
    return parallel


def units(shapes: Shapes) -> tuple[list[Shapes], Shapes]:
    """What FSDP2 gathers and reduces together: each block, each step that predicts a further token, and the root of all
    else. Routers are in none."""
    found: dict[str, Shapes] = defaultdict(dict)
    for name, shape in shapes.items():
        if in_router(name):
            continue
        found[_unit(name)][name] = shape
    root = found.pop("root", {})
    return list(found.values()), root


def experts_here(shapes: Shapes, ep: int) -> Shapes:
    """Of the experts of each layer those of one rank along ep, before FSDP2 shares them out: whole ones."""
    return {name: (rows // ep, *rest) for name, (rows, *rest) in shapes.items() if in_experts(name)}


def without_experts(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not in_experts(name)}


def _unit(name: str) -> str:
    for begin in ("blocks.", "mtp.steps."):
        if name.startswith(begin):
            return begin + name.removeprefix(begin).partition(".")[0]
    return "root"


def reshards_to(parallel: ParallelConfig) -> int | None:
    """Ranks among which a block's parameters lie between forward and backward; None: they stay whole. To FSDP2 a number
    of 1 is false."""
    wanted = parallel.reshard_after_forward
    if wanted is True:
        return parallel.shards
    return None if wanted is False or wanted == 1 else wanted
