"""The part of a tensor that is here. DTensor's modules cost seconds to import, so they are looked at only where a
tensor is one."""

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, sharing memory; the tensor itself where it is not a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """First and past-the-last row of dimension 0 that this rank holds."""
    if not is_sharded(tensor):
        return 0, tensor.shape[0]
    # private; seen to work on torch 2.11 and 2.15
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), "only cuts of dimension 0 are known here"
    return offset[0], offset[0] + shape[0]


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Scales local tensors in place in few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
