"""The part of a tensor that is here. DTensor's modules cost seconds to import, so they are looked at only where a
tensor is one."""

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Not for code that is compiled: while Dynamo traces it says no of each."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, sharing memory; the tensor itself where it is not a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_region(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """First and past-the-last index that this rank holds, for each dimension. Every cut is as torch.chunk makes it.

    The axes of a mesh cut from the last to the first: FSDP2 cuts what tensor parallelism has left."""
    region = [(0, size) for size in tensor.shape]
    if is_sharded(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        for axis in reversed(range(mesh.ndim)):
            if is_cut(placements[axis]):
                start, stop = region[placements[axis].dim]
                each = -(-(stop - start) // mesh.size(axis))
                first = min(start + mesh.get_local_rank(axis) * each, stop)
                region[placements[axis].dim] = first, min(first + each, stop)
    return tuple(region)


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Puts into a parameter its part of what all ranks hold together."""
    for dimension, (start, stop) in enumerate(local_region(parameter)):
        whole = whole.narrow(dimension, start, stop - start)
    local(parameter).copy_(whole)


def is_cut(placement: Any) -> bool:
    """Whether ranks hold different parts. FSDP2's cut of a tensor that is cut already is a placement of its own."""
    return hasattr(placement, "dim") and not placement.is_partial()


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Scales local tensors in place in few kernels. Some may be in CPU memory (parallel.cpu_offload) beside others on
    the device."""
    for device in {tensor.device for tensor in tensors}:
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], factor.to(device))
