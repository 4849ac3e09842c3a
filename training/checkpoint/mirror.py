"""Copies of a run's checkpoints at another place, made in the background: saved on a fast disk, safe in a store.

Nothing is kept in memory that matters: each pass compares the two folders, so that a restart or a failed copy changes
nothing but the time.
"""

import errno
import logging
import threading

from training.checkpoint import folders
from training.checkpoint.folders import Broken, Saved
from training.checkpoint.remote import Folder
from training.checkpoint.retention import Policy
from training.checkpoint.store import unwanted_folders

log = logging.getLogger(__name__)


def copy_missing(source: Folder, target: Folder, policy: Policy) -> None:
    """One pass: copies the newest checkpoint and the permanent ones that are not there, and scores that came later;
    then deletes at the target what the policy lets go. Raises OSError, also where the target is another run's."""
    here = folders.whole(source)
    there = {saved.step: saved for saved in folders.whole(target)}
    if others := {_run(saved) for saved in there.values()} - {_run(saved) for saved in here[-1:]}:
        raise FileExistsError(errno.EEXIST, f"it has checkpoints of another run, {others.pop()}", str(target))
    for saved in reversed(here):  # the newest first: it is the one a restart needs
        if saved.step in there:
            _copy_scores(saved, there[saved.step])
        elif saved.permanent or saved is here[-1]:
            _copy(saved, target)
    for folder in unwanted_folders(target, policy)[1]:
        folders.remove(folder)


def _run(saved: Saved) -> str:
    return str(saved.info.get("config", {}).get("name"))


def _copy(saved: Saved, target: Folder) -> None:
    left = folders.folder_of(target, saved.step)
    if left.exists():  # of a copy that was cut short
        folders.remove(left)
    try:
        folders.copy(saved, target)
    except Broken as why:
        log.warning("%s is damaged, and not copied to %s: %s", saved.folder, target, why)


def _copy_scores(saved: Saved, copied: Saved) -> None:
    scores = folders.read_scores(saved.folder)
    if scores is not None and folders.read_scores(copied.folder) is None:
        folders.write_scores(copied.folder, scores)


class Mirror:
    """Passes in a thread of rank 0, one at a time; what is saved meanwhile is copied by the next."""

    def __init__(self, source: Folder, target: Folder, policy: Policy) -> None:
        self.source, self.target, self.policy = source, target, policy
        self.due, self.ending = threading.Event(), False
        self.due.set()  # for what an earlier start has left
        self.thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self.thread.start()

    def saved(self) -> None:
        """There is a new checkpoint."""
        self.due.set()

    def finish(self) -> None:
        """Waits until what is saved is copied, or has failed to be."""
        self.ending = True
        self.due.set()
        self.thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            self.due.wait()
            self.due.clear()
            last = self.ending
            try:
                copy_missing(self.source, self.target, self.policy)
            except OSError as error:
                when = "when the run is started again" if last else "after the next save"
                log.warning("not all checkpoints are at %s; tried again %s: %s", self.target, when, error)
