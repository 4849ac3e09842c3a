"""Copies that differ in one bit are found on every layout, and the ranks that differ are named."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallel.local import local
from parallel.replicas import BLOCK, ReplicasDiffer, differing, fingerprint, refuse
from tests.ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_sees_each_bit_and_each_place(dtype: torch.dtype) -> None:
    values = torch.arange(12).remainder(2 if dtype is torch.bool else 12).view(3, 4).to(dtype)
    assert fingerprint(values.clone()) == fingerprint(values)
    for bit in range(8 * values.nbytes):
        other = values.clone()
        other.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
        assert fingerprint(other) != fingerprint(values), bit
    for place in range(1, 12):
        swapped = values.flatten()
        swapped[[0, place]] = swapped[[place, 0]]
        assert torch.equal(swapped, values.flatten()) == bool(fingerprint(swapped) == fingerprint(values)), place


def test_a_fingerprint_sees_places_in_other_blocks() -> None:
    values = torch.zeros(2 * BLOCK + 3)
    values[0] = 1.0
    for place in (BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 2):
        moved = torch.zeros_like(values)
        moved[place] = 1.0
        assert fingerprint(moved) != fingerprint(values)
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch.tensor(-0.0)) != fingerprint(torch.tensor(0.0))
    assert fingerprint(torch.tensor([math.nan])) == fingerprint(torch.tensor([math.nan]))


def spread() -> dict[str, Tensor]:
    """On 4 ranks, as 2 x 2: whole, cut once, cut in each of two ways with copies, and cut twice. No size divides."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).view(7, 5)
    layouts = {
        "copied": (Replicate(), Replicate()),
        "rows": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "both": (Shard(0), Shard(1)),
    }
    found: dict[str, Tensor] = {"plain": whole.clone(), "scalar": torch.tensor(3.0), "few": torch.zeros(1, 2)}
    for name, placements in layouts.items():
        found[name] = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    found["few"] = distribute_tensor(found["few"], mesh, layouts["rows"], src_data_rank=None)
    return found


# What is told where rank 3 alone changes a value of each: the ranks that hold its part are those of its row or column.
TOLD = {
    "plain": "rank 3 differs from ranks 0, 1, 2",
    "scalar": "rank 3 differs from ranks 0, 1, 2",
    "copied": "rank 3 differs from ranks 0, 1, 2",
    "rows": "rank 3 differs from rank 1",
    "columns": "rank 3 differs from rank 2",
}


def change_each() -> dict[str, dict[str, str]]:
    tensors = spread()
    found = {"nothing": differing(tensors)}
    for name, tensor in tensors.items():
        values = local(tensor).flatten()
        if torch.distributed.get_rank() == 3 and len(values) > 0:
            before = values[-1].item()
            local(tensor).view(-1)[-1] = -1.0
        found[name] = differing(tensors)
        if torch.distributed.get_rank() == 3 and len(values) > 0:
            local(tensor).view(-1)[-1] = before
    return found


def test_ranks_that_hold_the_same_part_are_compared() -> None:
    for found in run_ranks(4, change_each, group=True):
        assert found == {
            "nothing": {},
            "few": {},  # rank 3 holds no row of it
            "both": {},  # no part of it is held twice
            **{name: {name: told} for name, told in TOLD.items()},
        }


def three_ways() -> dict[str, str]:
    rank = torch.distributed.get_rank()
    return differing({"majority": torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0][rank]), "alike": torch.ones(2)})


def test_those_that_differ_from_most_are_named() -> None:
    assert run_ranks(5, three_ways, group=True)[2] == {"majority": "ranks 1, 3 differ from ranks 0, 2, 4"}


def test_many_differences_are_cut() -> None:
    refuse({})
    with pytest.raises(ReplicasDiffer) as raised:
        refuse({f"parameter {i}": "rank 1 differs from rank 0" for i in range(25)})
    assert "parameter 9: rank 1 differs from rank 0\nand 15 more" in str(raised.value)
