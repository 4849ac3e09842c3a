"""The files of a checkpoint, each known by its size and checksum.

The checksum is xxh128 (Yann Collet's xxHash): it finds damage at the speed of memory, so that a file is hashed while it
is written. It does not find forgery: whoever can write to the folder can also write another manifest.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

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


def hash_file(path: Path) -> File:
    """Reads the whole file. Raises OSError."""
    size, found = 0, xxh3_128()
    with open(path, "rb") as stream:
        while part := stream.read(READ_BYTES):
            found.update(part)
            size += len(part)
    return File(size, found.hexdigest())


def copy_file(source: Path, target: Path) -> File:
    """What was read. The copy is on the disk when this returns. Raises OSError."""
    with open(source, "rb") as stream, open(target, "wb") as copy:
        hashed = Hashed(copy)
        while part := stream.read(READ_BYTES):
            hashed.write(part)
        hashed.flush()
        os.fsync(hashed.fileno())
    return hashed.file()


def hash_bytes(data: bytes) -> File:
    return File(len(data), xxh3_128(data).hexdigest())


def fault(found: File, saved: File) -> str:
    """What is wrong with a file that was read; "" where nothing is."""
    if found.size != saved.size:
        return f"has {found.size} bytes instead of {saved.size}"
    if saved.xxh128 not in (None, found.xxh128):
        return "is not the one that was saved: its checksum is another"
    return ""


def faults(folder: Path, files: Mapping[str, File]) -> list[str]:
    """What is wrong with the files, each read whole."""
    wrong = []
    for name, saved in files.items():
        try:
            what = fault(hash_file(folder / name), saved)
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
        if what:
            wrong.append(f"{name} {what}")
    return wrong
