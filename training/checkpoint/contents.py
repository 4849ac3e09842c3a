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
from training.checkpoint.folders import Saved
from training.checkpoint.mirror import Mirror
from training.checkpoint.retention import EPHEMERAL, Policy
from training.checkpoint.store import SaveFailed, Store
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

    def save(self, step: int, progress: dict[str, Any], kind: str) -> Saved:
        """progress: what else must be known to go on, JSON values. kind: scheduled | final | ephemeral | signal. Raises
        SaveFailed on every rank; older checkpoints are untouched then."""
        permanent = kind == "final" or self._is_permanent(step)
        saved = self._write(step, progress, kind, permanent)
        self.store.prune(policy_of(self.config))
        if self.mirror is not None:
            self.mirror.saved()
        return saved

    def _is_permanent(self, step: int) -> bool:
        return _multiple(step, self.config.permanent_every) or step in self.config.permanent_steps

    def _write(self, step: int, progress: dict[str, Any], kind: str, permanent: bool) -> Saved:
        info = {"step": step, **progress, "kind": kind, "permanent": permanent}
        return self.store.save(step, self.state(), info | self.about)

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
        saved = self._write(step, progress, "test", permanent=False)
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
