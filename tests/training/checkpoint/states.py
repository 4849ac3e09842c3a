"""States of known values, in any layout, for the tests of checkpoints."""

import zlib
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from training.ranks import Ranks

# Names with shapes that divide by no number of ranks, and fewer rows than ranks.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embedding.weight": (67, 34),
    "model.norm.weight": (34,),
    "model.small.weight": (2, 5),
    "model.one.bias": (1,),
    "optimizer.embedding.weight.exp_avg": (67, 34),
    "optimizer.embedding.weight.step": (),
}


def cpu_ranks() -> Ranks:
    return Ranks(dist.group.WORLD)


def full(name: str, version: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value of a name, the same in every process, as one whole tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def spread(tensor: torch.Tensor, layout: str, ranks: int) -> torch.Tensor:
    """plain | shard | hybrid (2 x ranks / 2). Scalars stay plain, as an optimizer's step does."""
    if layout == "plain" or tensor.dim() == 0:
        return tensor
    if layout == "shard":
        return distribute_tensor(tensor, mesh(ranks), [Shard(0)], src_data_rank=None)
    return distribute_tensor(tensor, mesh(2, ranks // 2), [Replicate(), Shard(0)], src_data_rank=None)


@cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def state(layout: str, ranks: int, version: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: spread(full(name, version, dtype), layout, ranks) for name in SHAPES}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_holds(found: dict[str, torch.Tensor], version: int = 0) -> None:
    for name, tensor in found.items():
        assert torch.equal(whole(tensor), full(name, version)), f"{name} is not version {version}"
