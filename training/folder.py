"""The folder of a run, outputs/<name>: one for all ranks, stable over restarts, and never shared by two runs."""

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from models.schema import Changes
from training.checkpoint.remote import Remote, folder_at
from training.config import Config, Resume, leaves
from training.refusal import Problem
from training.status import read
from training.unresolved import in_words, to_write

LOCK = ".lock"


class RunFolder:
    """Names of what a run leaves. Makes nothing by itself. checkpoints: their folder, where it is not in the run's."""

    def __init__(self, out: str, name: str, checkpoints: str | None = None) -> None:
        self.name = name
        self.path = Path(out) / name
        self.config_path = self.path / "config.yaml"
        self.environment_path = self.path / "environment.json"
        self.data_path = self.path / "data.json"
        self.status_path = self.path / "status.json"
        self.log_path = self.path / "run.log"
        self.hang_path = self.path / "hang"
        self.rollbacks_path = self.path / "rollbacks.jsonl"
        self.checkpoints = self.path / "checkpoints" if checkpoints is None else folder_at(checkpoints)
        self._locks: list[int] = []

    def rank_log_path(self, rank: int) -> Path:
        """Where a rank other than 0 writes why it failed."""
        return self.path / f"run.rank{rank}.log"

    def holds_run(self) -> bool:
        """Whether a run has left numbers here. One that died before its first step left nothing worth keeping."""
        files = (self.path / "metrics.jsonl", self.path / "evals.jsonl")
        return any(file.exists() and file.stat().st_size > 0 for file in files)

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that the run here has saved, by its own word."""
        status = read(self.status_path)
        return None if status is None else status.get("checkpoint")

    def saved_info(self) -> dict[str, Any] | None:
        """What the run before said of itself, as the info of its checkpoints does; None where there is nothing."""
        if not self.config_path.exists():
            return None
        machine = json.loads(self.environment_path.read_text()) if self.environment_path.exists() else {}
        return {
            "config": flat(yaml.safe_load(self.config_path.read_text())),
            "from_environment": machine.get("from_environment", {}),
        }

    def hold(self) -> list[Problem]:
        """Makes the folder and keeps it until `release` or the end of this process, however it ends. A problem where
        another process has it: two runs would write into each other's files. For rank 0."""
        try:
            holder = self._lock(self.path)
        except OSError as error:
            return [
                Problem("out", self.path, f"cannot be written: {error.strerror}", "out=<a folder that can be written>")
            ]
        if holder is None:
            return []
        reason = f"another process ({holder}) is running into {self.path}"
        return [Problem("name", self.name, reason, "name=<another>, or wait for that run, or stop it")]

    def hold_checkpoints(self) -> list[Problem]:
        """The same for the folder of checkpoints, which two runs of different names may share: each would delete what
        the other saves."""
        key = "checkpoint.dir"
        try:
            if isinstance(self.checkpoints, Remote):  # has no locks; but now one knows whether it can be written
                (self.checkpoints / LOCK).write_bytes(_this_process().encode())
                return []
            holder = self._lock(self.checkpoints)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            return [Problem(key, self.checkpoints, reason, f"{key}=<a folder that can be written>, or null")]
        if holder is None:
            return []
        reason = f"another process ({holder}) saves its checkpoints there"
        return [Problem(key, self.checkpoints, reason, f"{key}=<another>, or wait for that run, or stop it")]

    def _lock(self, folder: Path) -> str | None:
        """Makes the folder and keeps it. The process that has it, if another does. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # A POSIX lock: it works between hosts, and child processes do not inherit it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(lock, 200).decode()
                os.close(lock)
                return holder
            # Otherwise the file system has no locks, and the run goes without.
        os.truncate(lock, 0)
        os.write(lock, _this_process().encode())
        self._locks.append(lock)
        return None

    def release(self) -> None:
        """Lets go of both, where a process does several runs."""
        while self._locks:
            os.close(self._locks.pop())


def _this_process() -> str:
    return f"host {socket.gethostname()}, process {os.getpid()}"


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """{"optimizer": {"lr": 0.001}} -> {"optimizer.lr": 0.001}."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


@dataclass(frozen=True)
class Difference:
    """A key that has another value than in the run before. None also stands for a key that one side does not have."""

    key: str
    saved: Any
    now: Any
    changes: Changes

    def __str__(self) -> str:
        return f"{self.key}: {as_typed(self.saved)} -> {as_typed(self.now)} ({self.changes.name})"


def as_typed(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{as_typed(of)}' for name, of in value.items())}}}"
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def changes_by_key(schema: Any = Config, prefix: str = "") -> dict[str, Changes]:
    """What each key of the config changes: {"optimizer.lr": Changes.math, ...}."""
    found: dict[str, Changes] = {}
    for field in fields(schema):
        if is_dataclass(field.type):
            found |= changes_by_key(field.type, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = field.metadata["changes"]
    return found


def differences(saved: dict[str, Any], now: Config) -> list[Difference]:
    """What differs between two resolved configs, in the order of the schema.

    saved: as `leaves` gave it, {"optimizer.lr": 0.001, ...}, perhaps by an older version: a key it lacks had its
    default, a key that is no longer known counts as mathematics, since nobody can say what it did.
    """
    categories = changes_by_key()
    defaults = leaves(Config())
    current = leaves(now)
    found = [
        Difference(key, saved.get(key, defaults[key]), value, categories[key])
        for key, value in current.items()
        if not same(saved.get(key, defaults[key]), value)
    ]
    found += [Difference(key, value, None, Changes.math) for key, value in saved.items() if key not in current]
    return found


def same(one: Any, other: Any) -> bool:
    """Equal, but true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def refuse_changes(found: list[Difference], allow: list[str]) -> list[Problem]:
    """A problem for each changed key that changes the mathematics and is not in `allow` (checkpoint.allow_changes)."""
    known = changes_by_key()
    all_changed = [difference.key for difference in found if difference.changes is Changes.math]
    together = f"checkpoint.allow_changes=[{','.join(all_changed)}]"
    problems = [
        Problem(
            difference.key,
            as_typed(difference.now),
            f"the run so far had {in_words(difference.saved)}, and this changes its mathematics",
            f"{to_write(difference.key, difference.saved)}, or name=<another> for a new run, or to go on all the same "
            + together,
        )
        for difference in found
        if difference.changes is Changes.math and difference.key not in allow
    ]
    gone = {difference.key for difference in found}
    problems += [
        Problem("checkpoint.allow_changes", key, "no such key", "a full key such as optimizer.lr")
        for key in allow
        if key not in known and key not in gone
    ]
    return problems


@dataclass(frozen=True)
class Claim:
    """What may be done with a run's folder: go on with the run in it, start one, or neither."""

    goes_on: bool
    changed: list[Difference]
    problems: list[Problem]


def claim(folder: RunFolder, config: Config, saved: dict[str, Any] | None, has_checkpoint: bool) -> Claim:
    """Reads the folder and changes nothing.

    saved: leaves of the newest complete checkpoint's config, else of `folder.saved_info()`, else None.
    A run that died before its first checkpoint is started anew by the same config, and refused to another one; one
    whose checkpoints are not found is not started anew, which would replace its metrics.
    """
    resume = config.checkpoint.resume
    ways_out = f"name=<another>, or delete {folder.path}"
    if resume is Resume.must and not has_checkpoint:
        reason = f"there is no complete checkpoint in {folder.checkpoints}"
        return Claim(
            False,
            [],
            [Problem("checkpoint.resume", "must", reason, "checkpoint.resume=auto, or the run's own name and out")],
        )
    if not has_checkpoint and not folder.holds_run():
        return Claim(False, [], [])
    if resume is Resume.never:
        reason = f"{folder.path} holds another run, and checkpoint.resume=never asks for a new one"
        return Claim(False, [], [Problem("name", folder.name, reason, ways_out)])
    lost = None if has_checkpoint else folder.saved_step()
    if lost is not None:
        reason = f"{folder.path} has a run that saved step {lost:,}, and there is no complete checkpoint"
        instead = f"checkpoint.dir=<the folder that has them>, or to begin again {ways_out}"
        return Claim(False, [], [Problem("checkpoint.dir", folder.checkpoints, reason, instead)])
    changed = differences(saved, config) if saved is not None else []
    problems = refuse_changes(changed, config.checkpoint.allow_changes)
    if problems and not has_checkpoint:
        others = "; ".join(str(difference) for difference in changed if difference.changes is Changes.math)
        reason = f"{folder.path} holds another run, stopped before its first checkpoint, that differs in {others}"
        problems = [Problem("name", folder.name, reason, ways_out)]
    return Claim(has_checkpoint, changed, problems)
