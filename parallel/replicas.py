"""Copies of a parameter are equal, or the run does not start."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.local import local


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 sum of the bits, each weighted by its place: equal for equal tensors, different when a value or its
    place is."""
    bits = tensor.detach().contiguous().view(torch.uint8).flatten().to(torch.int64)
    return (bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum()


def check_replicas(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Compares every parameter over the ranks along dp_replicate. Raises RuntimeError that names those that differ."""
    if mesh is None or mesh["dp_replicate"].size() == 1:
        return
    names = [name for name, _ in model.named_parameters()]
    own = torch.stack([fingerprint(local(parameter)) for parameter in model.parameters()]).to(mesh.device_type)
    everyone = [torch.empty_like(own) for _ in range(mesh["dp_replicate"].size())]
    dist.all_gather(everyone, own, group=mesh.get_group("dp_replicate"))
    for replica, theirs in enumerate(everyone):
        differing = [name for name, same in zip(names, (theirs == everyone[0]).tolist(), strict=True) if not same]
        if differing:
            raise RuntimeError(f"replica {replica} differs from replica 0 in {', '.join(differing)}")
