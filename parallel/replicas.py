"""What several ranks hold of a tensor has the same bits on each of them, or they are named."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.derive import derive
from parallel.local import local, local_region

BLOCK = 2**20  # values of which a fingerprint widens the bits at once
MULTIPLIER = 1_000_003  # odd, so that no block's sum is lost modulo 2^64
SHOWN = 10


class ReplicasDiffer(Exception):
    """Ranks hold other bits where they should hold the same."""


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 sum of the bits, each weighted by its place: equal for equal tensors, different where one value is, or
    two change places."""
    integers = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    bits = tensor.detach().flatten().view(integers)
    places = torch.arange(1, min(len(bits), BLOCK) + 1, device=bits.device)
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(BLOCK):
        found = found * MULTIPLIER + (block * places[: len(block)]).sum()
    return found


@torch.no_grad()
def differing(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Compares, over all ranks, the bits of those that hold the same region of a tensor of the same name. A collective;
    a rank may lack names that others have. Returns the same on each: by name, which ranks differ from which."""
    names = {derive(name, str(local_region(tensor))): name for name, tensor in tensors.items()}
    prints = torch.stack([fingerprint(local(tensor)).cpu() for tensor in tensors.values()])
    count = torch.tensor(len(names))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    own = torch.zeros(2, int(count), dtype=torch.int64)  # where a rank has fewer: region 0, the same on all
    own[:, : len(names)] = torch.stack([torch.tensor(list(names)), prints])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    regions, prints = torch.stack(everyone).unbind(1)  # [ranks, tensors] each

    _, holders = regions.unique(return_inverse=True)
    of_one_holder = torch.empty(int(holders.max()) + 1, dtype=torch.int64)
    of_one_holder[holders] = prints
    wrong = regions[prints != of_one_holder[holders]].unique().tolist()
    if not wrong:
        return {}
    known: list[dict[int, str]] = [{} for _ in everyone]
    dist.all_gather_object(known, {region: names[region] for region in wrong if region in names})
    named = {region: name for of_rank in known for region, name in of_rank.items()}
    found: dict[str, str] = {}
    for region, name in named.items():
        found.setdefault(name, _told(regions == region, prints))
    return found


def _told(held: Tensor, prints: Tensor) -> str:
    """held: which of the prints [ranks, tensors] are of one region. Ranks that differ from most of its holders are
    named first."""
    ranks: dict[int, list[int]] = {}
    for rank, place in held.nonzero().tolist():
        ranks.setdefault(int(prints[rank, place]), []).append(rank)
    most = max(ranks.values(), key=len)
    others = sorted(rank for same in ranks.values() if same is not most for rank in same)
    return f"{_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def refuse(differences: Mapping[str, str]) -> None:
    """Raises ReplicasDiffer that names what differs, if anything does."""
    lines = [f"{name}: {ranks}" for name, ranks in differences.items()]
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise ReplicasDiffer("\n".join(["ranks that should hold the same do not:", *lines[:SHOWN], *more]))


def check_replicas(model: Decoder, mesh: DeviceMesh | None) -> None:
    """Compares every parameter over all ranks. Raises ReplicasDiffer."""
    if mesh is not None and mesh.size() > 1:
        named = {model.copies.get(name, name): parameter for name, parameter in model.named_parameters()}
        refuse(differing({f"parameter {name}": parameter for name, parameter in named.items()}))
