"""What a rank has of each parameter, from the degrees alone. No torch here."""

import math

from models.config import ModelConfig
from models.shapes import Shapes
from parallel.config import Dtype, ParallelConfig, Strategy

BYTES = {Dtype.fp32: 4, Dtype.tf32: 4, Dtype.bf16: 2, Dtype.fp64: 8}

# The dimension along which tensor parallelism cuts the parameters of a module; those of no module here are whole on
# each of its ranks, as are the biases of modules that are cut along dimension 1.
TENSOR_CUTS = {"qkv": 0, "q": 0, "k": 0, "v": 0, "up": 0, "tokens": 0, "head": 0, "out": 1, "down": 1}


def master_bytes(compute: Dtype) -> int:
    """Of a value of the weights, their gradients and the optimizer's state."""
    return 8 if compute is Dtype.fp64 else 4


def tensor_cut(name: str) -> int | None:
    """The dimension along which tensor parallelism cuts a parameter; None: it is whole on each rank."""
    module, own = name.split(".")[-2:]
    cut = TENSOR_CUTS.get(module)
    return None if own == "bias" and cut == 1 else cut


def part(length: int, ranks: int, rank: int) -> int:
    """Of `length` rows those of one rank, as torch.chunk and DTensor cut: ceil(length / ranks) each while there are
    any."""
    each = math.ceil(length / ranks)
    return min(max(length - rank * each, 0), each)


def tensor_shapes(shapes: Shapes, tp: int, rank: int = 0) -> Shapes:
    """The parameters of one tensor rank before data parallelism cuts them further."""
    found = {}
    for name, shape in shapes.items():
        cut = tensor_cut(name)
        found[name] = tuple(part(n, tp, rank) if tp > 1 and place == cut else n for place, n in enumerate(shape))
    return found


def values(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def padded_shard(shapes: Shapes, shards: int) -> int:
    """Values of a rank's shard as FSDP2 stores, gathers and reduces it: rows of dimension 0 are padded to a multiple of
    the shards."""
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes.values())


def is_sharded(parallel: ParallelConfig) -> bool:
    """Whether FSDP2 holds the parameters; ddp with tensor parallelism is FSDP2 with one shard."""
    return parallel.strategy is Strategy.fsdp2 or (parallel.strategy is Strategy.ddp and parallel.tp > 1)


def reshards_to(parallel: ParallelConfig) -> int | None:
    """Ranks among which a block's parameters lie between forward and backward; None: they stay whole. A number of 1 is
    false and one of all shards is true, as FSDP2 takes them."""
    wanted = parallel.reshard_after_forward
    if wanted is True:
        return parallel.dp_shard
    return None if wanted is False or wanted == 1 else wanted
