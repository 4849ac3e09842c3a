"""The checkpoints of a run: saved whole or not at all, found, loaded into any layout, and deleted in order.

All ranks call every function here together. Rank 0 looks at the folder and tells the others; no rank trusts its own
listing of a file system that several hosts share.
"""

import errno
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from training.checkpoint import folders, matching, storage, tensors
from training.checkpoint.folders import Broken, Saved
from training.checkpoint.remote import Folder, folder_at
from training.checkpoint.retention import EPHEMERAL, Policy, StepInfo, score_of, to_delete
from training.checkpoint.tensors import RestoreReport, State, TensorsFailed
from training.ranks import Ranks
from training.refusal import Problem, Refusal

log = logging.getLogger(__name__)


class SaveFailed(Exception):
    """A checkpoint could not be saved. What was written of it is removed, older ones are untouched. On every rank."""

    def __init__(self, rank: int, step: int, file: str, reason: str) -> None:
        super().__init__(rank, step, file, reason)
        self.rank, self.step, self.file, self.reason = rank, step, file, reason

    def __str__(self) -> str:
        return (
            f"the checkpoint of step {self.step} was not saved: rank {self.rank} failed on {self.file}: {self.reason}"
        )


class Store:
    """The checkpoints in one folder, which need not exist before the first save.

    folder: the same on every rank, at a URL or on a file system that all hosts share.
    """

    def __init__(self, folder: Folder, ranks: Ranks) -> None:
        self.folder = folder
        self.ranks = ranks

    def save(self, step: int, state: State, info: dict[str, Any]) -> Saved:
        """Saves the state in a new folder, complete when its marker is there. If any rank fails, all raise SaveFailed.

        state: plain tensors (equal on all ranks) and DTensors, by name.
        info: JSON values; "permanent": true keeps the checkpoint from `prune`.
        A complete checkpoint of this step and this run is left as it is and returned, made permanent if `info` asks for
        it; one of another config is left as it is too, and fails the save.
        """
        json.dumps(info)  # a value that JSON lacks raises here, on every rank
        folder = folders.folder_of(self.folder, step)
        try:
            there = self.ranks.first_does(lambda: _make_room(folder, info))
        except OSError as error:
            raise _save_failed(step, folder, error) from error
        if there is not None:
            return there
        try:
            files = tensors.write(folder, state, self.ranks)
            return self.ranks.first_does(lambda: folders.complete(folder, step, info, files))
        except (OSError, TensorsFailed) as error:
            if self.ranks.rank == 0:
                _try_to_remove(folder)
            raise _save_failed(step, folder, error) from error

    def newest(self) -> Saved | None:
        """The newest complete checkpoint. Newer ones that are incomplete or damaged are named in a warning."""
        return self.ranks.first_does(lambda: folders.newest(self.folder))

    def newest_intact(self) -> Saved | None:
        """The newest complete checkpoint whose files are what was saved, all of them read. Newer ones are named in a
        warning, and count no longer: a run that goes on before them must not take them for its own."""
        saved = self.newest()
        while saved is not None and (faults := self.verify(saved)):
            step, why = saved.step, "; ".join(faults)
            self.ranks.first_does(partial(_condemn, saved, why))
            saved = self.ranks.first_does(partial(folders.newest, self.folder, step))
        if saved is not None and self.ranks.rank == 0 and any(file.xxh128 is None for file in saved.files.values()):
            log.warning(
                "%s was saved without checksums: only the sizes of its files are known to be right", saved.folder
            )
        return saved

    def verify(self, saved: Saved) -> list[str]:
        """What is wrong with the files of a checkpoint, on every rank. Each rank reads its share of them whole."""
        mine = {name: saved.files[name] for name in sorted(saved.files)[self.ranks.rank :: self.ranks.size]}
        return [fault for faults in self.ranks.gather(storage.faults(saved.folder, mine)) for fault in faults]

    def all(self) -> list[Saved]:
        """Every complete checkpoint, oldest first."""
        return self.ranks.first_does(lambda: folders.whole(self.folder))

    def load(self, saved: Saved, state: State, strict: bool = True) -> None:
        """Fills the tensors of the state in place, whatever the layout they were saved from.

        Only the parts that the state has are compared and read: model.* alone leaves the optimizer.* that was saved.
        strict: refuses names that only one side has; else they are named in a warning and stay as they are.
        Raises Refusal on every rank with all that does not fit, before a tensor is touched. A damaged file is refused
        when it is read; the state is then part old, part new.
        """
        try:
            stored = self.ranks.first_does(lambda: tensors.describe(saved.folder))
        except OSError as error:
            instead = "another checkpoint, or a whole copy of this one"
            raise Refusal([Problem("checkpoint", saved.folder, str(error), instead)]) from error
        found = matching.over_ranks(self.ranks.gather(matching.mismatch(state, stored)))
        names = matching.name_problems(saved.folder, found)
        problems = (names if strict else []) + matching.value_problems(saved.folder, found)
        if problems:
            raise Refusal(problems)
        if names and self.ranks.rank == 0:
            log.warning("%s", "\n".join(problem.reason for problem in names))
        try:
            tensors.read(saved.folder, {name: tensor for name, tensor in state.items() if name in stored}, self.ranks)
        except TensorsFailed as failure:
            reason = f"rank {failure.rank} cannot read {failure.file}: {failure.reason}"
            instead = "move this folder away; the newest complete checkpoint before it is used then"
            raise Refusal([Problem("checkpoint", saved.folder, reason, instead)]) from failure

    def verify_restore(self, saved: Saved, state: State) -> RestoreReport:
        """Reads the checkpoint into memory of its own, about 1 GiB a rank at a time, and compares it bitwise with the
        live state, each rank its part. The report is the same on all ranks. If any rank cannot read, all raise
        TensorsFailed."""
        return tensors.compare(saved.folder, state, self.ranks)

    def prune(self, policy: Policy) -> None:
        """Deletes what `to_delete` names, and older folders of saves and deletions that did not end. What cannot be
        deleted is named in a warning. Before anything goes, the newest checkpoint is read whole; raises SaveFailed, on
        every rank and with nothing deleted, where it is not what was saved. At a URL, where that would be a download
        for each save, its sizes are looked at: the server has compared checksums of what it was sent."""
        newest, unwanted = self.ranks.first_does(lambda: unwanted_folders(self.folder, policy))
        if newest is None or not unwanted:
            return
        if isinstance(self.folder, Path) and (faults := self.verify(newest)):
            self.ranks.first_does(partial(_condemn, newest, "; ".join(faults)))
            raise SaveFailed(0, newest.step, str(newest.folder), f"read back, {'; '.join(faults)}")
        self.ranks.first_does(lambda: _try_to_remove(*unwanted))

    def remove(self, saved: Saved) -> None:
        """Deletes a checkpoint, permanent or not."""
        self.ranks.first_does(lambda: _try_to_remove(saved.folder))

    def scores(self, saved: Saved) -> dict[str, Any] | None:
        """The scores of a checkpoint; None where it was not scored."""
        return self.ranks.first_does(lambda: folders.read_scores(saved.folder))

    def write_scores(self, saved: Saved, scores: dict[str, Any]) -> None:
        """Writes rank 0's scores beside the manifest. Raises OSError on every rank."""
        self.ranks.first_does(lambda: folders.write_scores(saved.folder, scores))


def find(path: str, ranks: Ranks) -> Saved:
    """The checkpoint that checkpoint.load names: one checkpoint's folder, or the newest complete one of a run's folder
    or of a folder of checkpoints. Raises Refusal on every rank where there is none."""
    found = ranks.first_does(lambda: folders.find(path))
    if isinstance(found, Problem):
        raise Refusal([found])
    return found


def find_intact(path: str, ranks: Ranks) -> Saved:
    """The same with all files read: of the folder of several the newest whose files are what was saved; those that are
    not are named in a warning. Raises Refusal on every rank where there is none."""
    saved = find(path, ranks)
    while faults := Store(saved.folder.parent, ranks).verify(saved):
        why = "; ".join(faults)
        named = saved.folder == folder_at(path)
        older = None if named else ranks.first_does(partial(folders.find, path, saved.step))
        if not isinstance(older, Saved):
            instead = "another checkpoint, or a whole copy of this one"
            raise Refusal([Problem("checkpoint.load", path, f"{saved.folder} is damaged: {why}", instead)])
        if ranks.rank == 0:
            log.warning("%s is not used: %s", saved.folder, why)
        saved = older
    return saved


def _make_room(folder: Folder, info: dict[str, Any]) -> Saved | None:
    """The run's complete checkpoint that is there already; else an empty folder in the place of what may be there.
    Raises FileExistsError where another run's is."""
    if folder.exists():
        try:
            there = folders.read(folder)
            if there.info.get("config") != info.get("config"):
                raise FileExistsError(errno.EEXIST, "another run has saved its checkpoint there", str(folder))
            return folders.make_permanent(there) if info.get("permanent") and not there.permanent else there
        except Broken as why:
            log.warning("%s is saved anew: %s", folder, why)
            folders.remove(folder)
    folder.mkdir(parents=True)
    return None


def _save_failed(step: int, folder: Folder, error: OSError | TensorsFailed) -> SaveFailed:
    if isinstance(error, TensorsFailed):
        return SaveFailed(error.rank, step, error.file, error.reason)
    return SaveFailed(0, step, str(error.filename or folder), error.strerror or str(error))


def unwanted_folders(checkpoints: Folder, policy: Policy) -> tuple[Saved | None, list[Folder]]:
    """The newest complete checkpoint, and the folders that may go once it is known to be intact."""
    there = folders.whole(checkpoints)
    if not there:
        return None, []
    gone = set(to_delete([_step_info(saved, policy) for saved in there], policy))
    unended = [
        folder
        for step, folder in folders.steps_in(checkpoints)
        if step < there[-1].step and not (folder / folders.MARKER).exists()
    ]
    return there[-1], [saved.folder for saved in there if saved.step in gone] + unended


def _step_info(saved: Saved, policy: Policy) -> StepInfo:
    name = policy.best_of
    score = None if name is None else score_of(folders.read_scores(saved.folder), name)
    return StepInfo(saved.step, saved.permanent, saved.info.get("kind") in EPHEMERAL, score)


def _condemn(saved: Saved, why: str) -> None:
    log.warning("%s is not used: %s", saved.folder, why)
    try:
        folders.condemn(saved, why)
    except OSError as error:
        log.warning("%s could not be marked as damaged: %s", saved.folder, error)


def _try_to_remove(*unwanted: Folder) -> None:
    for folder in unwanted:
        try:
            folders.remove(folder)
        except OSError as error:
            log.warning("%s could not be deleted: %s", folder, error)
