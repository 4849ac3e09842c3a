"""The mesh, and the same ranks as layers of experts see them."""

import pytest
import torch
import torch.distributed as dist

from parallel.config import ParallelConfig, Strategy
from parallel.mesh import build_mesh, context_view, data_coordinate, expert_view, start_process_group
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def groups_of_experts() -> None:
    start_process_group(CPU, 60)
    degrees = ParallelConfig(Strategy.fsdp2, dp_replicate=2, dp_shard=2, cp=2, ep=2)
    mesh, experts, sequences = (view(degrees, CPU) for view in (build_mesh, expert_view, context_view))
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(mesh.get_group("dp_replicate")) == [rank % 4, rank % 4 + 4]
    assert dist.get_process_group_ranks(experts.get_group("ep")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    here = rank // 4 * 4 + rank % 2
    assert dist.get_process_group_ranks(experts.get_group("expert_shard")) == [here, here + 2]
    assert experts.get_group("dp_replicate").size() == 2
    assert dist.get_process_group_ranks(mesh.get_group("dp_shard")) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
    assert dist.get_process_group_ranks(sequences.get_group("cp")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert data_coordinate(mesh, degrees.cp) == (rank // 2, 4)


def test_experts_borrow_from_the_axes_that_share_a_copy() -> None:
    run_ranks(8, groups_of_experts, timeout=120)


def test_a_view_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="ep=3"):
        expert_view(ParallelConfig(dp_shard=4, ep=3), CPU)
