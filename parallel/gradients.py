"""The norm of the gradient over every axis of the mesh, and clipping by it."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.local import is_cut, is_sharded, local, multiply_
from parallel.mesh import sum_over


@torch.no_grad()
def sum_partial(parameters: list[nn.Parameter]) -> None:
    """Adds up gradients of which each rank has a part where FSDP2 has not done so: of parameters that all ranks hold
    and use on their own share of the sequence. One collective for those of the same kind."""
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_sharded(gradient) and any(p.is_partial() for p in gradient.placements):
            kinds[gradient.device_mesh, gradient.placements, gradient.dtype].append(parameter)
    for (mesh, placements, _), same in kinds.items():
        whole = torch.cat([local(parameter.grad).flatten() for parameter in same if parameter.grad is not None])
        for dimension, placement in enumerate(placements):
            if placement.is_partial():
                dist.all_reduce(whole, group=mesh.get_group(dimension))
        for parameter, part in zip(same, whole.split([local(p).numel() for p in same]), strict=True):
            own: Any = parameter
            gradient = part.view_as(local(parameter))
            parameter.grad = type(own).from_local(gradient, mesh, own.placements, run_check=False)


@torch.no_grad()
def global_norm(parameters: list[nn.Parameter], mesh: DeviceMesh | None) -> Tensor:
    """L2 norm of the whole gradient, a scalar on the device and the same on every rank. Parameters may lie on different
    meshes: the squares of each kind of placement are summed over the axes it is cut along, then added, and the sums of
    the stages of a pipeline."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            kind = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
            kinds[kind].append(local(gradient))
    squares = []
    for kind, gradients in kinds.items():
        square = torch.nn.utils.get_total_norm(gradients).square()
        if kind is not None:
            of_kind, placements = kind
            for dimension, placement in enumerate(placements):
                if is_cut(placement) and of_kind.size(dimension) > 1:
                    dist.all_reduce(square, group=of_kind.get_group(dimension))
        squares.append(square)
    return sum_over(mesh, ("pp",), torch.stack(squares).sum()).sqrt()


@torch.no_grad()
def clip(parameters: list[nn.Parameter], norm: Tensor, most: float) -> None:
    """Scales gradients down so that their global norm is at most `most`, without reading `norm` on the host
    (torch.nn.utils.clip_grad_norm_'s formula)."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    multiply_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
