"""The norm of the gradient over every axis of the mesh, and clipping by it."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.local import is_cut, is_sharded, local, multiply_
from parallel.mesh import DATA_AXES, sum_over


@torch.no_grad()
def sum_alike(model: nn.Module, factors: dict[str, float], mesh: DeviceMesh) -> None:
    """Gives gradients of parameters that all ranks along tp hold whole the same bits: the sum over tp of each times its
    factor (parallel.tensor.cut_tensors). One collective a step, after FSDP2 has summed over data ranks."""
    held = []
    for name, parameter in model.named_parameters():
        if name in factors and parameter.grad is not None:
            held.append((local(parameter.grad), factors[name]))
    if not held:
        return
    whole = torch.cat([(gradient * factor).flatten() for gradient, factor in held])
    dist.all_reduce(whole, group=mesh.get_group("tp"))
    for (gradient, _), part in zip(held, whole.split([gradient.numel() for gradient, _ in held]), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def sum_whole(parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sums the gradients of parameters that FSDP2 leaves alone over the ranks that see different tokens, once a step
    and in their own dtype."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    together = sum_over(mesh, (*DATA_AXES, "tp"), torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, part in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


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
        # with parallel.cpu_offload all but routers' gradients are in CPU memory
        squares.append(square if mesh is None else square.to(mesh.device_type))
    return sum_over(mesh, ("pp",), torch.stack(squares).sum()).sqrt()


@torch.no_grad()
def clip(parameters: list[nn.Parameter], norm: Tensor, most: float) -> None:
    """Scales gradients down so that their global norm is at most `most`, without reading `norm` on the host
    (torch.nn.utils.clip_grad_norm_'s formula)."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    multiply_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
