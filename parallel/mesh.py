"""Degrees to a mesh of ranks with named axes, and sums over them."""

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.config import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # ranks along cp are neighbours along one of the middle two
EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep")  # of the same ranks, as layers of experts see them
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks along these see different tokens
LOSS_AXES = (*DATA_AXES, "pp")  # ranks along these have parts of the loss: along pp all but one have 0
FIRST_STEP_PATIENCE = 3  # the first step compiles and connects: its collectives may wait this many times longer
LEEWAY_SECONDS = 15.0  # in which who waits for whom is found out and told, before a collective gives up


def launched() -> bool:
    """Whether torchrun, or a launcher with its environment, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_process_group(device: torch.device, timeout_seconds: float) -> dist.ProcessGroup:
    """Connects the ranks (torchrun's environment, or this process alone) and returns a group on CPU for agreement and
    saving."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = _patience(timeout_seconds)
    if launched():
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    return _cpu_group(timeout_seconds)


def saving_group(timeout_seconds: float) -> dist.ProcessGroup:
    """Another group on CPU: of threads that save while the steps use all others. A rank whose disk is slower than the
    others' by so much more fails."""
    return _cpu_group(timeout_seconds)


def _cpu_group(timeout_seconds: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=_patience(timeout_seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _patience(timeout_seconds: float) -> timedelta:
    return timedelta(seconds=timeout_seconds * FIRST_STEP_PATIENCE + LEEWAY_SECONDS)


def shorten_timeouts(meshes: Sequence[DeviceMesh], cpu_group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
    """After the first step: from now on a collective that waits longer than this ends the run. meshes: none on a single
    device."""
    if not meshes:
        return
    # public since torch 2.15; before, private with the same effect, seen on 2.11
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    of_meshes = [group for mesh in meshes for group in mesh.get_all_groups()]
    for group in (dist.group.WORLD, cpu_group, *of_meshes):
        set_timeout(timedelta(seconds=timeout_seconds + LEEWAY_SECONDS), group)


def build_mesh(degrees: ParallelConfig, device: torch.device) -> DeviceMesh:
    """One mesh over all ranks; neighbours along the last axis are neighbours in rank. Degrees of 1 are axes too.

    To parameters, ranks that share a sequence are like those with other sequences: they are part of dp_shard, or of
    dp_replicate where no state is shared out."""
    sizes = (degrees.pp, degrees.copies, degrees.shards, degrees.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


def context_view(degrees: ParallelConfig, device: torch.device) -> DeviceMesh:
    """The ranks of `build_mesh` by the sequences they share: an axis `cp`, between those of tp and all others."""
    others = degrees.pp * degrees.dp_replicate * degrees.dp_shard
    return init_device_mesh(device.type, (others, degrees.cp, degrees.tp), mesh_dim_names=("others", "cp", "tp"))


def expert_view(degrees: ParallelConfig, device: torch.device) -> DeviceMesh:
    """The ranks of `build_mesh` as layers of experts see them: those along dp_shard, cp and tp are regrouped into `ep`
    neighbours that share a layer's experts, times `expert_shard` ranks that share each expert's state.

    Raises ValueError where ep does not divide them."""
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % degrees.ep != 0:
        raise ValueError(f"ep={degrees.ep} does not divide dp_shard x cp x tp = {ranks}")
    sizes = (degrees.pp, degrees.dp_replicate, ranks // degrees.ep, degrees.ep)
    return init_device_mesh(device.type, sizes, mesh_dim_names=EXPERT_AXES)


def data_coordinate(mesh: DeviceMesh | None, cp: int = 1) -> tuple[int, int]:
    """This rank's place among the ranks that see different sequences, and their number; `cp` ranks share each."""
    place, number = 0, 1
    if mesh is not None:
        for axis in DATA_AXES:
            place = place * mesh[axis].size() + mesh.get_local_rank(axis)
            number *= mesh[axis].size()
    return place // cp, number // cp


def random_coordinate(mesh: DeviceMesh | None) -> int:
    """Ranks of the same number draw the same random numbers in a step. Ranks along tp and pp hold different parts of
    whatever is random."""
    place, _ = data_coordinate(mesh)
    for axis in ("pp", "tp") if mesh is not None else ():
        place = place * mesh[axis].size() + mesh.get_local_rank(axis)  # type: ignore[index,union-attr]
    return place


def sum_over(mesh: DeviceMesh | None, axes: Iterable[str], value: Tensor) -> Tensor:
    """Sums a tensor in place over the ranks along the axes."""
    if mesh is not None:
        for axis in axes:
            if mesh[axis].size() > 1:
                dist.all_reduce(value, group=mesh.get_group(axis))
    return value
