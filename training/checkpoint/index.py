"""The index of a checkpoint's tensors, .metadata: a pickle that torch.distributed.checkpoint (DCP) writes.

A pickle may name any function and have it called. Here only the classes that an index is made of are known by name, so
that reading runs no code of whoever wrote the file; and the files that an index names must lie beside it.
"""

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from training.checkpoint.folders import TENSOR_INDEX, Broken, is_inside

# As seen in the indices of torch 2.11 and 2.15.
CLASSES: dict[tuple[str, str], Any] = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {str(torch.strided): torch.strided}.__getitem__,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,  # where it was saved
    ("pathlib._local", "PosixPath"): PurePosixPath,  # the same from Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in CLASSES:
            raise Broken(f"{TENSOR_INDEX} names {module}.{name}, which is no part of an index, and is not read")
        return CLASSES[module, name]


def parse_index(data: bytes) -> Metadata:
    """Raises Broken, also where the index names a file outside of its folder."""
    try:
        index = _Unpickler(io.BytesIO(data)).load()
    except Broken:
        raise
    except Exception as error:  # what a damaged pickle raises is any of a dozen
        raise Broken(f"{TENSOR_INDEX} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(index, Metadata):
        raise Broken(f"{TENSOR_INDEX} is no index of tensors")
    for part in (index.storage_data or {}).values():
        if not is_inside(part.relative_path):
            raise Broken(f"{TENSOR_INDEX} names a file outside of its folder: {part.relative_path!r}")
    return index
