"""A checkpoint on disk: a folder that counts only when it is whole.

    step-000500/
      __0_0.distcp ...   tensors, written by torch.distributed.checkpoint
      .metadata          which tensor is where in them
      manifest.json      step, info of the run, and every file with its size
      COMPLETE           written last; holds the hash of manifest.json
      scores.json        evaluation scores, written later
      PERMANENT          never deleted; may also be put there by hand

Used by rank 0 alone; the others are told what it found.
"""

import hashlib
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.files import write_bytes, write_json
from training.refusal import Problem

FORMAT = 1
MANIFEST = "manifest.json"
MARKER = "COMPLETE"
PERMANENT = "PERMANENT"
SCORES = "scores.json"
TENSOR_INDEX = ".metadata"  # the name is torch.distributed.checkpoint's

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. `info` is what the run said about itself when it saved."""

    step: int
    folder: Path
    info: dict[str, Any]
    permanent: bool


class Broken(OSError):
    """The folder is not a whole checkpoint; the text says why."""


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """Every checkpoint's folder, whole or not, by number and oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in checkpoints.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is meant to be one checkpoint, whole or not."""
    return re.fullmatch(r"step-\d+", folder.name) is not None or (folder / MANIFEST).exists()


def read(folder: Path) -> Saved:
    """The checkpoint in the folder. Its marker, its manifest and the size of each file are looked at. Raises Broken."""
    try:
        marker = (folder / MARKER).read_bytes()
        manifest_bytes = (folder / MANIFEST).read_bytes()
        if marker != _marker(manifest_bytes):
            raise Broken(f"{MANIFEST} or {MARKER} is not the one that was saved")
        manifest = json.loads(manifest_bytes)
        if manifest["format"] != FORMAT:
            raise Broken(f"it has format {manifest['format']}, and this version reads {FORMAT}")
        _check_files(folder, manifest)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise Broken("the save did not end" if name == MARKER else f"{name} is missing") from error
    permanent = manifest["info"].get("permanent", False) or (folder / PERMANENT).exists()
    return Saved(manifest["step"], folder, manifest["info"], permanent)


def _check_files(folder: Path, manifest: dict[str, Any]) -> None:
    for name, size in manifest["files"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise Broken(f"{name} has {found} bytes instead of {size}")
    if _sha256((folder / TENSOR_INDEX).read_bytes()) != manifest["tensor_index_sha256"]:
        raise Broken(f"{TENSOR_INDEX} is not the one that was saved")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _marker(manifest: bytes) -> bytes:
    return f"{_sha256(manifest)}\n".encode()


def complete(folder: Path, step: int, info: dict[str, Any], tensor_files: dict[str, int]) -> Saved:
    """Makes a checkpoint of a folder that has the tensors: manifest, a look at the files, marker. Raises OSError."""
    index = (folder / TENSOR_INDEX).read_bytes()
    manifest = {
        "format": FORMAT,
        "step": step,
        "info": info,
        "files": tensor_files | {TENSOR_INDEX: len(index)},
        "tensor_index_sha256": _sha256(index),
    }
    write_json(folder / MANIFEST, manifest)
    _check_files(folder, manifest)
    write_bytes(folder / MARKER, _marker((folder / MANIFEST).read_bytes()))
    return read(folder)


def newest(checkpoints: Path) -> Saved | None:
    """The newest whole checkpoint. Newer ones that are broken are named in a warning."""
    for _, folder in reversed(steps_in(checkpoints)):
        try:
            return read(folder)
        except Broken as fault:
            log.warning("%s is not used: %s", folder, fault)
    return None


def find(path: str) -> Saved | Problem:
    """The checkpoint that checkpoint.load names: one checkpoint's folder, or the newest complete one of a run's folder
    or of a folder of checkpoints; else why there is none."""
    folder = Path(path)
    kinds = "the folder of a run, its folder of checkpoints, or one checkpoint (step-000500)"
    if not folder.is_dir():
        return Problem("checkpoint.load", path, "there is no such folder", kinds)
    if is_checkpoint(folder):
        try:
            return read(folder)
        except Broken as fault:
            other = newest(folder.parent)
            return Problem(
                "checkpoint.load",
                path,
                f"not a complete checkpoint: {fault}",
                f"checkpoint.load={other.folder}" if other else kinds,
            )
    return (
        newest(folder / "checkpoints")
        or newest(folder)
        or Problem("checkpoint.load", path, "no complete checkpoint in it", kinds)
    )


def whole(checkpoints: Path) -> list[Saved]:
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


def remove(folder: Path) -> None:
    """Deletes a checkpoint, its marker first: cut short at any point, what is left does not count. Raises OSError."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def read_scores(folder: Path) -> dict[str, Any] | None:
    """The scores, or None where there are none or the file is damaged: they can be computed again."""
    try:
        return json.loads((folder / SCORES).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_scores(folder: Path, scores: dict[str, Any]) -> None:
    write_json(folder / SCORES, scores)
