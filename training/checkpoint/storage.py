"""The files of a checkpoint, each known by its size and checksum.

The checksum is xxh128 (Yann Collet's xxHash): it finds damage at the speed of memory, so that a file is hashed while it
is written. It does not find forgery: whoever can write to the folder can also write another manifest.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from training import files
from training.checkpoint.remote import Folder, Remote

READ_BYTES = 1 << 24  # at a time


@dataclass(frozen=True)
class File:
    """Bytes of a file, and its checksum in hexadecimal; None for one saved before there were checksums."""

    size: int
    xxh128: str | None


class Hashed:
    """A stream of bytes to write to that hashes what passes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.size = 0
        self.hash = xxh3_128()

    def write(self, data: Any) -> int:
        """data: bytes, or what has their interface."""
        part = memoryview(data).cast("B")
        self.hash.update(part)
        self.size += len(part)
        self.stream.write(part)
        return len(part)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def close(self) -> None:
        """Who opened the stream closes it."""

    def file(self) -> File:
        return File(self.size, self.hash.hexdigest())


def hash_file(path: Folder) -> File:
    """Reads the whole file. Raises OSError."""
    size, found = 0, xxh3_128()
    with path.open("rb") as stream:
        while part := stream.read(READ_BYTES):
            found.update(part)
            size += len(part)
    return File(size, found.hexdigest())


def hash_bytes(data: bytes) -> File:
    return File(len(data), xxh3_128(data).hexdigest())


def copy_file(source: Folder, target: Folder) -> File:
    """What was read. The copy is safe when this returns. Raises OSError."""
    with source.open("rb") as stream, target.open("wb") as copy:
        hashed = Hashed(copy)
        while part := stream.read(READ_BYTES):
            hashed.write(part)
        if isinstance(target, Path):
            hashed.flush()
            os.fsync(hashed.fileno())
    return hashed.file()


def write_bytes(path: Folder, data: bytes) -> None:
    """The file is there with all of this, or as it was before. Raises OSError."""
    if isinstance(path, Remote):
        path.write_bytes(data)
    else:
        files.write_bytes(path, data)


def sizes(folder: Folder, names: Iterable[str]) -> dict[str, int]:
    """Bytes of each of these files. On a disk each is looked at, since in a listing other hosts' files may be late.
    Raises FileNotFoundError with the first that is missing."""
    if isinstance(folder, Path):
        return {name: (folder / name).stat().st_size for name in names}
    listed = folder.sizes()
    for name in names:
        if name not in listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / name))
    return {name: listed[name] for name in names}


def folders_in(folder: Folder) -> list[Folder]:
    if isinstance(folder, Remote):
        return list(folder.folders())
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def remove_folder(folder: Folder) -> None:
    """Raises OSError."""
    if isinstance(folder, Remote):
        folder.remove_folder()
    else:
        shutil.rmtree(folder)


def fault(found: File, saved: File) -> str:
    """What is wrong with a file that was read; "" where nothing is."""
    if found.size != saved.size:
        return f"has {found.size} bytes instead of {saved.size}"
    if saved.xxh128 not in (None, found.xxh128):
        return "is not the one that was saved: its checksum is another"
    return ""


def faults(folder: Folder, saved_files: Mapping[str, File]) -> list[str]:
    """What is wrong with the files, each read whole."""
    wrong = []
    for name, saved in saved_files.items():
        try:
            what = fault(hash_file(folder / name), saved)
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
        if what:
            wrong.append(f"{name} {what}")
    return wrong
