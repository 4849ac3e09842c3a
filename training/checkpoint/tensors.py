"""Tensors to and from a checkpoint's folder, through torch.distributed.checkpoint (DCP).

A state is flat: names to tensors, plain (the same on every rank) or DTensors (each rank holds a part). What is stored
is the global tensor, so any layout reads what any other has written. DCP takes seconds to import: the first call does.
"""

import pickle
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from training.checkpoint.folders import TENSOR_INDEX
from training.checkpoint.remote import Folder
from training.checkpoint.storage import File, Hashed, hash_bytes, write_bytes
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
def _failures(folder: Folder) -> Iterator[None]:
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


def write(folder: Folder, state: State, ranks: Ranks) -> dict[str, File]:
    """Writes the state of all ranks into an empty folder. Returns the files of all ranks, on every rank. Raises
    TensorsFailed.

    A replicated tensor is written once, and the ranks share that work. Each rank hashes what it writes.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    written: dict[str, File] = {}

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # a full disk, which torch's archive makes a riddle of
                    raise error.__context__ from None
                raise

        def finish(self, metadata: Metadata, results: list[Any]) -> None:
            """As DCP's own, but hashed, without this machine's paths, and renamed only where that is possible."""
            parts = {part.index: part.storage_data for of_rank in results for part in of_rank}
            metadata = replace(
                metadata, version=CURRENT_DCP_VERSION, storage_data=parts, storage_meta=StorageMeta(modules=[])
            )
            data = pickle.dumps(metadata)
            write_bytes(folder / TENSOR_INDEX, data)
            written[TENSOR_INDEX] = hash_bytes(data)

    with _failures(folder), _without_crc32():
        writer = Writer(".", sync_files=isinstance(folder, Path))
        writer.path, writer.fs = folder, _files(written)  # type: ignore[assignment]
        dcp.save(dict(state), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    return {name: file for one in ranks.gather(written) for name, file in one.items()}


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch computes a checksum of its own for each tensor, which takes longer than all else but the disk, and which
    nothing reads: each file has one already."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _files(written: dict[str, File]) -> Any:
    """DCP's file system, for URLs too. What is written through it is put in `written`."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Files(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with path.open(mode) as stream:
                if mode != "wb":
                    yield stream
                    return
                hashed = Hashed(stream)
                yield hashed
            written[path.name] = hashed.file()

        def concat_path(self, path: Any, suffix: str) -> Any:
            return path / suffix

        def mkdir(self, path: Any) -> None:
            path.mkdir(parents=True, exist_ok=True)

        def exists(self, path: Any) -> bool:
            """The folder is empty."""
            return False

    return Files()


def _reader(folder: Folder) -> Any:
    """DCP's reader of a folder, with an index that runs no code. Its tensors are read with weights_only."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from training.checkpoint.index import parse_index

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            index = parse_index((folder / TENSOR_INDEX).read_bytes())
            index.storage_meta = StorageMeta(load_id=self.load_id)
            return index

    reader = Reader(".")
    reader.path, reader.fs = folder, _files({})  # type: ignore[assignment]
    return reader


def describe(folder: Folder) -> dict[str, Stored]:
    """Names, global shapes and dtypes of the tensors in a folder. Reads the index only. Raises OSError."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = _reader(folder).read_metadata().state_dict_metadata
    return {
        name: Stored(tuple(entry.size), entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(folder: Folder, state: State, ranks: Ranks) -> None:
    """Fills the tensors of the state in place; the folder must have each at its global shape. Raises TensorsFailed."""
    import torch.distributed.checkpoint as dcp

    with _failures(folder):
        dcp.load(dict(state), storage_reader=_reader(folder), process_group=ranks.group, no_dist=ranks.group is None)


def pairs(one: Folder, other: Folder, names: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """These tensors of two folders, whole, in one process; about ROUND_BYTES of each are in memory at a time. Raises
    OSError and TensorsFailed."""
    kinds = [describe(folder) for folder in (one, other)]
    metas = {name: torch.empty(kinds[0][name].shape, dtype=kinds[0][name].dtype, device="meta") for name in names}
    for group in _groups(metas):
        states = [
            {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in group} for stored in kinds
        ]
        for folder, state in zip((one, other), states, strict=True):
            read(folder, state, Ranks.alone())
        yield from ((name, states[0][name], states[1][name]) for name in group)


@dataclass(frozen=True)
class RestoreReport:
    """A checkpoint read back: seconds on the slowest rank, and the tensors (with rank) that are not the live ones."""

    seconds: float
    different: list[str]


@torch.no_grad()
def compare(folder: Folder, state: State, ranks: Ranks) -> RestoreReport:
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
