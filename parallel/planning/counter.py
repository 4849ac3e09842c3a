"""Counts the collectives that are really made, to hold the formulas of traffic.py against."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # private, no public counterpart; seen on torch 2.11 and 2.15

from parallel import ring

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# torch's names of the operators, plain and functional (DTensor's); others are counted under torch's own name.
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
}
RECEIVE = "recv_"  # counted where it is sent

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")  # text that names no group

Key = tuple[str, int, str]  # axis, ranks of the group, kind of collective


class CollectiveCounter(TorchDispatchMode):
    """While entered, counts this process's collectives and the bytes of their whole buffers, by the axis of the mesh,
    the size of the group and the kind; also what it sends to one other rank.

    All collectives go through torch's dispatcher, also those that DDP and FSDP2 make inside backward, where autograd
    takes the mode along. A group of no axis is "none", so nothing stays unseen. For eager code: compiled graphs are
    not looked into."""

    def __init__(self, *meshes: DeviceMesh) -> None:
        """meshes: views of the same ranks; a group of several axes is of the first."""
        super().__init__()
        self.number: Counter[Key] = Counter()
        self.buffer_bytes: Counter[Key] = Counter()
        self._axes: dict[str, tuple[str, set[int]]] = {}  # by the group's name its axis and ranks
        for mesh in meshes:
            for name in mesh.mesh_dim_names or ():
                if mesh[name].size() > 1:
                    group = mesh.get_group(name)
                    self._axes.setdefault(group.group_name, (name, _ranks(group)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # DTensor makes plain operators and collectives of it, which come here again
        own = ring.INSIDE.get(func.overloadpacket.__name__) if func.namespace == "espalier" else None
        if own is not None:  # an operator of ours that communicates inside
            with self:
                return own(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            group = next(filter(None, map(_group, (*args, *(kwargs or {}).values()))), None)
            name = func.overloadpacket.__name__
            if group is not None and name != RECEIVE:  # without one it waits, or wraps what came
                self._count(name, group, [*args, result])
        return result

    def _count(self, name: str, group: dist.ProcessGroup, values: list[Any]) -> None:
        key = (self._axis(group), group.size(), KINDS.get(name, name))
        self.number[key] += 1
        # The whole buffer is the largest of what goes in and what comes out.
        self.buffer_bytes[key] += max(sum(tensor.nbytes for tensor in _tensors(value)) for value in values)

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axis of this group, or of which it is a part: FSDP2 may reshard to fewer ranks than an axis has."""
        if group.group_name in self._axes:
            return self._axes[group.group_name][0]
        ranks = _ranks(group)
        return next((name for name, known in self._axes.values() if ranks <= known), "none")


def _ranks(group: dist.ProcessGroup) -> set[int]:
    return set(dist.get_process_group_ranks(group))


def _group(value: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of an operator is: c10d's take it in a box, the functional ones its name."""
    if isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith(".ProcessGroup"):
        return dist.ProcessGroup.unbox(value)
    if isinstance(value, str) and value not in REDUCTIONS:
        resolve: Any = dist.distributed_c10d._resolve_process_group  # private; seen on torch 2.11 and 2.15
        return resolve(value)
    return value if isinstance(value, dist.ProcessGroup) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
