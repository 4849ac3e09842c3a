"""Where text comes from: the files of a corpus, in its order."""

import glob
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from training.config import DataConfig, DataKind
from training.refusal import Problem, Refusal

# Modules that some distributions leave out, split off or change.
OPTIONAL_MODULES = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo"}
LEFT_OUT_FOLDERS = {"__pycache__", "idle_test", "macholib", "site-packages", "test", "tests"}
TOPICS = "pydoc_data/topics.py"


class Kind(Enum):
    text = "text"  # the file is a document
    jsonl = "jsonl"  # each line is a document
    parquet = "parquet"  # each row is a document
    topics = "topics"  # each topic of pydoc's documentation is a document


# By ending: what the file is, and how it is packed.
KINDS = {
    ".txt": (Kind.text, ""),
    ".txt.gz": (Kind.text, "gz"),
    ".txt.zst": (Kind.text, "zst"),
    ".jsonl": (Kind.jsonl, ""),
    ".jsonl.gz": (Kind.jsonl, "gz"),
    ".jsonl.zst": (Kind.jsonl, "zst"),
    ".parquet": (Kind.parquet, ""),
}


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    name: str
    path: Path
    kind: Kind
    packed: str
    """"", "gz" or "zst"."""
    size: int
    """Bytes of the file."""
    changed: int
    """Time of its last change in ns."""


def sources(config: DataConfig) -> list[Source]:
    """The files of the corpus in its order. Raises Refusal naming data.kind or data.files."""
    if config.kind is DataKind.stdlib:
        return stdlib_sources(Path(sysconfig.get_path("stdlib")))
    return _file_sources(config.files)


def stdlib_sources(folder: Path) -> list[Source]:
    """Source files of the standard library in `folder`, sorted by relative path.

    Without tests, and without what distributions leave out or change, so that the same version of Python gives much the
    same text everywhere."""
    modules = sys.stdlib_module_names - OPTIONAL_MODULES
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS]
        for file in files:
            path = Path(parent, file)
            name = path.relative_to(folder).as_posix()
            if path.suffix == ".py" and name.split("/")[0].removesuffix(".py") in modules:
                found.append(_source(path, name, Kind.topics if name == TOPICS else Kind.text))
    if not found:
        reason = f"this Python has no source text of its standard library in {folder}"
        raise Refusal([Problem("data.kind", "stdlib", reason, "data=text data.files=[<your files>]")])
    return sorted(found, key=lambda source: source.name)


def _file_sources(patterns: list[str]) -> list[Source]:
    """The files in the order of the patterns, each pattern's sorted; a file named twice is read once."""
    if not patterns:
        raise Refusal([Problem("data.files", [], "no files are given", "data.files=[texts/*.txt,more/**/*.jsonl.gz]")])
    found: dict[Path, Source] = {}
    problems: list[Problem] = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(match) for match in matches if not os.path.isdir(match)]
        problem = _pattern_problem(pattern, files)
        if problem is not None:
            problems.append(Problem("data.files", pattern, *problem))
            continue
        for path in files:
            kind, packed = _kind(path) or (Kind.text, "")
            found.setdefault(path.resolve(), _source(path, path.as_posix(), kind, packed))
    if problems:
        raise Refusal(problems)
    return list(found.values())


def _pattern_problem(expanded: str, files: list[Path]) -> tuple[str, str] | None:
    """Why these files cannot be the corpus, and what to write instead."""
    if os.path.isdir(expanded):
        return "is a folder", f"data.files=[{expanded.rstrip('/')}/**/*.txt]"
    if not files:
        return f"no file matches in {Path.cwd()}", "files that are there"
    if unknown := [path for path in files if _kind(path) is None]:
        return f"{_some(unknown)} of no known kind", f"files ending in {', '.join(KINDS)}"
    if closed := [path for path in files if not os.access(path, os.R_OK)]:
        return f"{_some(closed)} not readable", "files you may read"
    return None


def _some(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more are" if len(paths) > 3 else " are" if len(paths) > 1 else " is"
    return ", ".join(map(str, paths[:3])) + more


def _kind(path: Path) -> tuple[Kind, str] | None:
    """Kind and packing by the file's ending, None for others."""
    return KINDS.get("".join(path.suffixes[-2:]).lower()) or KINDS.get(path.suffix.lower())


def _source(path: Path, name: str, kind: Kind, packed: str = "") -> Source:
    status = path.stat()
    return Source(name, path, kind, packed, status.st_size, status.st_mtime_ns)


def unchanged(source: Source) -> bool:
    """Whether the file is as it was when it was listed."""
    status = source.path.stat()
    return (status.st_size, status.st_mtime_ns) == (source.size, source.changed)


def sha256(source: Source) -> str:
    """Of the file as it is. Raises Refusal if it cannot be read."""
    try:
        with open(source.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(source.path, error) from None


def unreadable(path: Path, error: Exception) -> Refusal:
    return Refusal([Problem("data.files", path, f"cannot be read: {error}", "a whole file, or leave this one out")])
