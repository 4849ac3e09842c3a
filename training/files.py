"""Files that are whole or not there: written beside and renamed."""

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the file in one step; a reader or a crash sees the old one or the new one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def append_line(path: Path, text: str) -> None:
    """Adds a line in one write, so that a crash leaves at most one torn line at the end."""
    with open(path, "ab") as file:
        file.write(text.encode() + b"\n")
