"""A checkpoint on a disk or at a URL: a folder that counts only when it is whole.

    step-000500/
      __0_0.distcp ...   tensors, written by torch.distributed.checkpoint
      .metadata          which tensor is where in them
      manifest.json      step, info of the run, and every file with its size and checksum
      COMPLETE           written last; holds the hash of manifest.json
      scores.json        evaluation scores, written later
      PERMANENT          never deleted; may also be put there by hand
      DAMAGED            in the place of the marker where a file was found to be another than the saved one; says which

Used by rank 0 alone; the others are told what it found.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.checkpoint.remote import WAITS, Folder, Remote, folder_at
from training.checkpoint.storage import (
    File,
    copy_file,
    fault,
    folders_in,
    hash_bytes,
    hash_file,
    remove_folder,
    sizes,
    write_bytes,
)
from training.refusal import Problem

FORMAT = 2  # 1 had no checksums
MANIFEST = "manifest.json"
MARKER = "COMPLETE"
DAMAGED = "DAMAGED"
PERMANENT = "PERMANENT"
SCORES = "scores.json"
TENSOR_INDEX = ".metadata"  # the name is torch.distributed.checkpoint's

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. `info` is what the run said about itself when it saved, `files` what it has saved."""

    step: int
    folder: Folder
    info: dict[str, Any]
    permanent: bool
    files: Mapping[str, File] = field(default_factory=dict)


class Broken(OSError):
    """The folder is not a whole checkpoint; the text says why."""


def folder_of(checkpoints: Folder, step: int) -> Folder:
    return checkpoints / f"step-{step:06d}"


def steps_in(checkpoints: Folder) -> list[tuple[int, Folder]]:
    """Every checkpoint's folder, whole or not, by number and oldest first."""
    found = [(re.fullmatch(r"step-(\d+)", folder.name), folder) for folder in folders_in(checkpoints)]
    return sorted(((int(match[1]), folder) for match, folder in found if match), key=lambda one: one[0])


def is_checkpoint(folder: Folder) -> bool:
    """Whether the folder is meant to be one checkpoint, whole or not."""
    return re.fullmatch(r"step-\d+", folder.name) is not None or (folder / MANIFEST).exists()


def is_inside(name: Any) -> bool:
    """Whether a file's name leads to no other folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


def read(folder: Folder) -> Saved:
    """The checkpoint in the folder. Its marker, its manifest, the size of each file and the checksum of the index are
    looked at. Raises Broken."""
    try:
        marker = (folder / MARKER).read_bytes()
        manifest_bytes = (folder / MANIFEST).read_bytes()
        if marker != _marker(manifest_bytes):
            raise Broken(f"{MANIFEST} or {MARKER} is not the one that was saved")
        step, info, files = _parse(manifest_bytes)
        _check_files(folder, files)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise Broken(_why_no_marker(folder) if name == MARKER else f"{name} is missing") from error
    permanent = info.get("permanent", False) or (folder / PERMANENT).exists()
    return Saved(step, folder, info, permanent, files)


def _parse(manifest_bytes: bytes) -> tuple[int, dict[str, Any], dict[str, File]]:
    """Step, info and files of a manifest. Raises Broken."""
    try:
        manifest = json.loads(manifest_bytes)
        if manifest["format"] not in (1, FORMAT):
            raise Broken(f"it has format {manifest['format']}, and this version reads 1 and {FORMAT}")
        files = {name: File(*_fields(about)) for name, about in manifest["files"].items()}
        step, info = int(manifest["step"]), dict(manifest["info"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Broken(f"{MANIFEST} is none: {type(error).__name__}: {error}") from error
    for name in files:
        if not is_inside(name):
            raise Broken(f"{MANIFEST} names a file outside of its folder: {name!r}")
    return step, info, files


def _fields(about: Any) -> tuple[int, str | None]:
    """Size and checksum of a file, as the manifest has them; format 1 has the size alone."""
    return (about, None) if isinstance(about, int) else (about["size"], about["xxh128"])


def _why_no_marker(folder: Folder) -> str:
    try:
        return f"it was found damaged: {(folder / DAMAGED).read_bytes().decode().strip()}"
    except FileNotFoundError:
        return "the save did not end"


def _check_files(folder: Folder, files: Mapping[str, File]) -> None:
    """Sizes, and the whole index. Raises Broken and FileNotFoundError."""
    found_sizes = sizes(folder, files)
    for name, saved in files.items():
        found = File(found_sizes[name], saved.xxh128)
        if name == TENSOR_INDEX and found.size == saved.size:
            found = hash_bytes((folder / name).read_bytes())
        if what := fault(found, saved):
            raise Broken(f"{name} {what}")


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _marker(manifest: bytes) -> bytes:
    return f"{_sha256(manifest)}\n".encode()


def complete(folder: Folder, step: int, info: dict[str, Any], files: Mapping[str, File]) -> Saved:
    """Makes a checkpoint of a folder that has its files: manifest, a look at the files, marker. Raises OSError."""
    about = {name: asdict(file) for name, file in files.items()}
    manifest = as_json({"format": FORMAT, "step": step, "info": info, "files": about})
    write_bytes(folder / MANIFEST, manifest)
    _check_written(folder, files)
    write_bytes(folder / MARKER, _marker(manifest))
    return read(folder)


def _check_written(folder: Folder, files: Mapping[str, File]) -> None:
    """An object store may show late what was written to it. Raises OSError."""
    for wait in WAITS if isinstance(folder, Remote) else ():
        try:
            return _check_files(folder, files)
        except (Broken, FileNotFoundError):
            time.sleep(wait)
    _check_files(folder, files)


def condemn(saved: Saved, reason: str) -> None:
    """From now on the checkpoint does not count. What it has stays, and the reason with it, until a newer one is
    complete or its step is saved anew. Raises OSError."""
    write_bytes(saved.folder / DAMAGED, f"{reason}\n".encode())
    (saved.folder / MARKER).unlink(missing_ok=True)


def checkpoints_of(path: Folder) -> Folder:
    """The folder of checkpoints of a run's folder; else the folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def newest(checkpoints: Folder, before: int | None = None) -> Saved | None:
    """The newest whole checkpoint, of those before a step if one is given. Newer ones that are broken are named in a
    warning."""
    for step, folder in reversed(steps_in(checkpoints)):
        if before is not None and step >= before:
            continue
        try:
            return read(folder)
        except Broken as why:
            log.warning("%s is not used: %s", folder, why)
    return None


def find(path: str, before: int | None = None) -> Saved | Problem:
    """The checkpoint that checkpoint.load names: one checkpoint's folder, or the newest complete one of a run's folder
    or of a folder of checkpoints, of those before a step if one is given; else why there is none."""
    folder = folder_at(path)
    kinds = "the folder of a run, its folder of checkpoints, or one checkpoint (step-000500)"
    if not folder.is_dir():
        return Problem("checkpoint.load", path, "there is no such folder", kinds)
    if is_checkpoint(folder):
        try:
            return read(folder)
        except Broken as why:
            other = newest(folder.parent)
            return Problem(
                "checkpoint.load",
                path,
                f"not a complete checkpoint: {why}",
                f"checkpoint.load={other.folder}" if other else kinds,
            )
    return (
        newest(folder / "checkpoints", before)
        or newest(folder, before)
        or Problem("checkpoint.load", path, "no complete checkpoint in it", kinds)
    )


def whole(checkpoints: Folder) -> list[Saved]:
    """Every whole checkpoint, oldest first."""
    found = []
    for _, folder in steps_in(checkpoints):
        try:
            found.append(read(folder))
        except Broken:
            continue
    return found


def make_permanent(saved: Saved) -> Saved:
    write_bytes(saved.folder / PERMANENT, b"")
    return read(saved.folder)


def remove(folder: Folder) -> None:
    """Deletes a checkpoint, its marker first: cut short at any point, what is left does not count. Raises OSError."""
    (folder / MARKER).unlink(missing_ok=True)
    remove_folder(folder)


def read_scores(folder: Folder) -> dict[str, Any] | None:
    """The scores, or None where there are none or the file is damaged: they can be computed again."""
    try:
        return json.loads((folder / SCORES).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_scores(folder: Folder, scores: dict[str, Any]) -> None:
    write_bytes(folder / SCORES, as_json(scores))


def copy(saved: Saved, checkpoints: Folder) -> Saved:
    """Copies a checkpoint into a folder of checkpoints, its marker last. Each file is hashed as it is read and again
    from where it was written. Raises OSError, and Broken where a file is not what was saved."""
    target = folder_of(checkpoints, saved.step)
    target.mkdir(parents=True)
    for name, file in saved.files.items():
        copied = copy_file(saved.folder / name, target / name)
        if what := fault(copied, file) or fault(hash_file(target / name), File(file.size, copied.xxh128)):
            raise Broken(f"{name} {what}")
    for name in (SCORES, PERMANENT, MANIFEST, MARKER):
        if (saved.folder / name).exists():
            write_bytes(target / name, (saved.folder / name).read_bytes())
    return read(target)
