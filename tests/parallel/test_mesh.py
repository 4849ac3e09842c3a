"""The mesh, and the same ranks as layers of experts see them."""

import time

import pytest
import torch
import torch.distributed as dist

from parallel import mesh
from parallel.config import ParallelConfig, Strategy
from parallel.mesh import build_mesh, context_view, data_coordinate, expert_view, shorten_timeouts, start_process_group
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def groups_of_experts() -> None:
    start_process_group(CPU, 60)
    degrees = ParallelConfig(Strategy.fsdp2, dp_replicate=2, dp_shard=2, cp=2, ep=2)
    world, experts, sequences = (view(degrees, CPU) for view in (build_mesh, expert_view, context_view))
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(world.get_group("dp_replicate")) == [rank % 4, rank % 4 + 4]
    assert dist.get_process_group_ranks(experts.get_group("ep")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    here = rank // 4 * 4 + rank % 2
    assert dist.get_process_group_ranks(experts.get_group("expert_shard")) == [here, here + 2]
    assert experts.get_group("dp_replicate").size() == 2
    assert dist.get_process_group_ranks(world.get_group("dp_shard")) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
    assert dist.get_process_group_ranks(sequences.get_group("cp")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert data_coordinate(world, degrees.cp) == (rank // 2, 4)


def test_experts_borrow_from_the_axes_that_share_a_copy() -> None:
    run_ranks(8, groups_of_experts, timeout=120)


def waits_alone() -> float:
    """Seconds until a rank that its neighbour along cp keeps waiting gives up, where it leaves the watchdog no time."""
    mesh.LEEWAY_SECONDS = 0.0
    group = start_process_group(CPU, 60)
    view = context_view(ParallelConfig(Strategy.fsdp2, cp=2), CPU)
    shorten_timeouts([view], group, 1)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=view.get_group("cp"))
    else:
        time.sleep(8)
    return time.monotonic() - began


def test_a_rank_that_waits_for_another_of_its_sequence_gives_up_in_time() -> None:
    assert run_ranks(2, waits_alone, timeout=30)[0] < 7


def test_a_view_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="ep=3"):
        expert_view(ParallelConfig(dp_shard=4, ep=3), CPU)
