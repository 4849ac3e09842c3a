"""Tensors to and from a checkpoint's folder, through torch.distributed.checkpoint (DCP).

A state is flat: names to tensors, plain (the same on every rank) or DTensors (each rank holds a part). What is stored
is the global tensor, so any layout reads what any other has written. DCP takes seconds to import: the first call does.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.ranks import Ranks

State = Mapping[str, torch.Tensor]

ROUND_BYTES = 1 << 30  # of a rank's memory that a comparison takes at a time


class TensorsFailed(Exception):
    """A rank could not write or read its tensors. Raised on every rank alike."""

    def __init__(self, rank: int, file: str, reason: str) -> None:
        super().__init__(rank, file, reason)
        self.rank, self.file, self.reason = rank, file, reason


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says about one of its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def _failures(folder: Path) -> Iterator[None]:
    """Turns DCP's exception, a BaseException that every rank raises, into TensorsFailed."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as meant
            yield
    except CheckpointException as failure:
        rank = min(failure.failures)
        error = failure.failures[rank][0]
        if isinstance(error, OSError) and error.strerror:
            raise TensorsFailed(rank, str(error.filename or folder), error.strerror) from failure
        raise TensorsFailed(rank, str(folder), f"{type(error).__name__}: {error}") from failure


def write(folder: Path, state: State, ranks: Ranks) -> None:
    """Writes the state of all ranks into an empty folder. Raises TensorsFailed.

    A replicated tensor is written once, and the ranks share that work.
    """
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # a full disk, which torch's archive makes a riddle of
                    raise error.__context__ from None
                raise

    with _failures(folder):
        writer = Writer(folder)
        dcp.save(dict(state), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file with tensors, from DCP's account: in a listing other hosts' files may be late. Raises OSError.

    What `storage_data` holds is not documented; seen in torch 2.11 and 2.15.
    """
    import torch.distributed.checkpoint as dcp

    sizes: dict[str, int] = {}
    for part in dcp.FileSystemReader(folder).read_metadata().storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    return sizes


def describe(folder: Path) -> dict[str, Stored]:
    """Names, global shapes and dtypes of the tensors in a folder. Reads the index only. Raises OSError."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: Stored(tuple(entry.size), entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(folder: Path, state: State, ranks: Ranks) -> None:
    """Fills the tensors of the state in place; the folder must have each at its global shape. Raises TensorsFailed."""
    import torch.distributed.checkpoint as dcp

    with _failures(folder):
        reader = dcp.FileSystemReader(folder)
        dcp.load(dict(state), storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)


@dataclass(frozen=True)
class RestoreReport:
    """A checkpoint read back: seconds on the slowest rank, and the tensors (with rank) that are not the live ones."""

    seconds: float
    different: list[str]


@torch.no_grad()
def compare(folder: Path, state: State, ranks: Ranks) -> RestoreReport:
    """Reads the folder into memory of its own, ROUND_BYTES at a time, and compares it with the state bit by bit."""
    groups = _groups(state)
    seconds = 0.0
    different: list[str] = []
    for turn in range(max(ranks.gather(len(groups)))):
        live = {name: state[name] for name in groups[turn]} if turn < len(groups) else {}
        fresh = {name: _inverted(tensor) for name, tensor in live.items()}
        start = time.perf_counter()
        read(folder, fresh, ranks)
        seconds += time.perf_counter() - start
        different += [
            f"{name} (rank {ranks.rank})"
            for name, tensor in live.items()
            if not torch.equal(_bits(_local(tensor)), _bits(_local(fresh[name])))
        ]
    return RestoreReport(max(ranks.gather(seconds)), [name for names in ranks.gather(different) for name in names])


def _groups(state: State) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        local = _local(tensor)
        if groups[-1] and size + local.nbytes > ROUND_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += local.nbytes
    return groups


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that a NaN equals itself and 0 is not -0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _inverted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind in which every bit is wrong, so that whatever is not read shows."""
    from torch.distributed.tensor import DTensor

    local = _local(tensor)
    wrong = _bits(local).bitwise_not().view(local.dtype).reshape(local.shape)
    if not isinstance(tensor, DTensor):
        return wrong
    return DTensor.from_local(
        wrong, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
