"""What a run saves and where it goes on: the model and optimizer as one flat state, with what must be known to go
on."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.decoder import Decoder
from parallel.apply import Spread
from parallel.values import check_values
from training.checkpoint.background import Background
from training.checkpoint.folders import Saved, folder_of
from training.checkpoint.mirror import Mirror
from training.checkpoint.retention import EPHEMERAL, Policy
from training.checkpoint.store import SaveFailed, Store
from training.checkpoint.tensors import State
from training.config import Best, CheckpointConfig, Load
from training.optimizers.base import Optimizer

MODEL, OPTIMIZER, POWERSGD = "model.", "optimizer.", "powersgd."

log = logging.getLogger(__name__)


def model_state(model: Decoder) -> dict[str, Tensor]:
    """Parameters by name; a shared one once, by the name of its owner."""
    return {MODEL + name: p.data for name, p in model.named_parameters() if name not in model.copies}


def load_model(store: Store, saved: Saved, spread: Spread) -> None:
    """Weights alone. Raises WrongValues."""
    store.load(saved, model_state(spread.model))
    spread.copy_shared({})
    check_values(spread.model, spread.mesh, str(saved.folder))


@dataclass
class Checkpoints:
    """The checkpoints of this run. Every method is a collective."""

    store: Store
    config: CheckpointConfig
    spread: Spread
    optimizer: Optimizer
    about: dict[str, Any]  # what stays the same over the run: config, versions, tokenizer
    mirror: Mirror | None = None  # of rank 0, with checkpoint.mirror
    background: Background | None = None  # with checkpoint.background
    saving: int | None = None  # the step whose checkpoint is being written in the background
    begun: int = 0  # saves in the background
    seconds: float = 0.0  # of the last save on this rank, however it was made

    def state(self) -> dict[str, Tensor]:
        copies = tuple(f"{name}." for name in self.spread.model.copies)
        optimizer = {name: value for name, value in self.optimizer.tensors().items() if not name.startswith(copies)}
        powersgd = self.spread.powersgd.tensors() if self.spread.powersgd is not None else {}
        return (
            model_state(self.spread.model)
            | {OPTIMIZER + name: value for name, value in optimizer.items()}
            | {POWERSGD + name: value for name, value in powersgd.items()}
        )

    def kind_due(self, step: int, clock_due: bool) -> str | None:
        """What is to be saved after this step: scheduled | ephemeral. clock_due: checkpoint.every_minutes is over."""
        if _multiple(step, self.config.every) or step in self.config.permanent_steps:
            return "scheduled"
        return "ephemeral" if _multiple(step, self.config.ephemeral_every) or clock_due else None

    def save(self, step: int, progress: dict[str, Any], kind: str) -> Saved | None:
        """progress: what else must be known to go on, JSON values. kind: scheduled | final | ephemeral | signal. Raises
        SaveFailed on every rank; older checkpoints are untouched then.

        Returns None where it goes on in the background: `finish` has the checkpoint then. The steps may change the
        state at once. What ends a run is not left to the background. No other save may be under way."""
        permanent = kind == "final" or self._is_permanent(step)
        info = self._info(step, progress, kind, permanent)
        if self.background is None or kind in ("final", "signal"):
            return self._save(self.store, self.state(), info)
        copied = self.background.copy(self.state())
        store = Store(self.store.folder, self.background.ranks)
        self.background.start(lambda: self._save(store, copied, info))
        self.saving = step
        self.begun += 1
        return None

    def _save(self, store: Store, state: State, info: dict[str, Any]) -> Saved:
        began = time.perf_counter()
        saved = store.save(info["step"], state, info)
        store.prune(policy_of(self.config))
        self.seconds = time.perf_counter() - began
        if self.mirror is not None:
            self.mirror.saved()
        return saved

    def writes(self) -> bool:
        """Whether this rank is writing in the background."""
        return self.background is not None and self.background.writes

    def ended(self) -> int:
        """How many saves in the background have ended on this rank."""
        return 0 if self.background is None else self.background.ended

    def finish(self) -> Saved | None:
        """Waits until the save under way has ended on all ranks. None where there is none. Raises SaveFailed on every
        rank if it failed on any."""
        if self.background is None or self.saving is None:
            return None
        step, self.saving = self.saving, None
        outcome = self.background.wait()
        mine = None if isinstance(outcome, Saved) else self._failure(step, outcome)
        failures = [failure for failure in self.store.ranks.gather(mine) if failure is not None]
        if failures:
            raise failures[0]
        assert isinstance(outcome, Saved)
        return outcome

    def _failure(self, step: int, error: BaseException) -> SaveFailed:
        if isinstance(error, SaveFailed):
            return error
        folder = str(folder_of(self.store.folder, step))
        return SaveFailed(self.store.ranks.rank, step, folder, f"{type(error).__name__}: {error}")

    def leave(self, seconds: float) -> None:
        """Not a collective. Before an early end: lets the save that is under way end, for so long at most. What is not
        written by then does not count."""
        if self.background is not None:
            self.background.leave(seconds)

    def _is_permanent(self, step: int) -> bool:
        return _multiple(step, self.config.permanent_every) or step in self.config.permanent_steps

    def _info(self, step: int, progress: dict[str, Any], kind: str, permanent: bool) -> dict[str, Any]:
        return {"step": step, **progress, "kind": kind, "permanent": permanent} | self.about

    def restore(self, saved: Saved, parts: Load) -> None:
        if parts is not Load.all:
            load_model(self.store, saved, self.spread)
            return
        state = self.state()
        if self.spread.powersgd is not None:
            self.spread.powersgd.steps_done = saved.info["step"]
            if begun_anew := self._other_powersgd(saved):
                state = {name: value for name, value in state.items() if not name.startswith(POWERSGD)}
                if self.store.ranks.rank == 0:
                    log.warning("PowerSGD starts anew, without its errors of before: %s", begun_anew)
        self.store.load(saved, state)
        self.spread.copy_shared(self.optimizer.tensors())
        check_values(self.spread.model, self.spread.mesh, str(saved.folder))

    def _other_powersgd(self, saved: Saved) -> str:
        """Why the PowerSGD state of a checkpoint, each rank's own, is of no use here; "" where it is."""
        if (ranks := saved.info["ranks"]) != self.about["ranks"]:
            return f"{saved.folder} was saved by {ranks} ranks, and there are {self.about['ranks']}"
        for key in ("optimizer.compression", "optimizer.powersgd_rank"):
            if (before := saved.info["config"].get(key)) != (now := self.about["config"][key]):
                return f"{saved.folder} was saved with {key}={before}, and it is {now}"
        return ""

    def test_restore(self, step: int, progress: dict[str, Any]) -> tuple[float, float]:
        """Saves to the real destination, reads it back, compares bit by bit and deletes it. Returns the seconds of
        saving and of reading. Raises SaveFailed where a bit differs. A run that is killed meanwhile goes on from it, so
        it is whole; it takes the place of no other, as it will be gone."""
        began = time.perf_counter()
        saved = self.store.save(step, self.state(), self._info(step, progress, "test", permanent=False))
        seconds = time.perf_counter() - began
        report = self.store.verify_restore(saved, self.state())
        self.store.remove(saved)
        if report.different:
            raise SaveFailed(0, step, str(saved.folder), f"read back, these differ: {', '.join(report.different)}")
        return seconds, report.seconds


def policy_of(config: CheckpointConfig) -> Policy:
    return Policy(config.keep, config.keep_best, config.best_is is Best.highest)


def _multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_scored(store: Store, saved: Saved) -> bool:
    """Whether this checkpoint has its scores, or never gets any (one that serves a restart)."""
    return (saved.info["kind"] in EPHEMERAL and not saved.permanent) or store.scores(saved) is not None
