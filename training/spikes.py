"""Spikes of the loss or the gradient norm: what counts as one, and what a run that goes back leaves out. No torch
here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from training.config import SpikesConfig
from training.data.order import Order
from training.files import write_text
from training.metrics.records import Record, read, to_line

WATCHED = ("loss", "grad_norm")
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LEAST_DEVIATION = 0.01  # of the median: where nothing changes the smallest change would be many deviations


class TooManySpikes(Exception):
    """The run has gone back as often as it may, and here is another spike."""


@dataclass(frozen=True)
class Spike:
    """A step whose value is too far above those of the steps before it."""

    step: int
    what: str  # of WATCHED
    value: float
    median: float
    score: float  # deviations above the median

    def __str__(self) -> str:
        above = f"{self.score:.1f} deviations above the median {self.median:.4g}"
        return f"spike in step {self.step}: {self.what} {self.value:.4g}, {above}"


@dataclass(frozen=True)
class Rollback:
    """That the run went back once, as rollbacks.jsonl and each later checkpoint say it."""

    step: int  # of the spike, as are the next four
    what: str
    value: float
    median: float
    score: float
    checkpoint: int  # where the run goes on
    first: int  # sample left out, as in Order.left_out
    stop: int
    sequence_length: int  # of the samples


def score(value: float, past: Sequence[float]) -> tuple[float, float]:
    """The median of the past, and how many deviations the value is above it. The deviation is estimated by the median
    absolute deviation, which a few spikes in the past do not move (Hampel 1974)."""
    middle = median(past)
    deviation = MAD_TO_DEVIATION * median(abs(other - middle) for other in past)
    return middle, (value - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-30)


class Spikes:
    """Looks for spikes where records are read. What it knows follows from the steps up to a checkpoint and is saved
    there, so a run that was killed finds what the unbroken one finds."""

    def __init__(self, config: SpikesConfig, path: Path) -> None:
        """path: of rollbacks.jsonl."""
        self.config, self.path = config, path
        self.past: list[list[float]] = []  # the values of WATCHED in the last steps of the window
        self.rollbacks: list[Rollback] = []

    def find(self, records: Sequence[Record]) -> Spike | None:
        """The first of the steps that is a spike. Those before it join the past."""
        for record in records:
            if spike := self._judge(record):
                return spike
            self.accept([record])
        return None

    def _judge(self, record: Record) -> Spike | None:
        if self.config.threshold == 0 or len(self.past) < self.config.window or not _counts(record):
            return None
        for what, past in zip(WATCHED, zip(*self.past, strict=True), strict=True):
            middle, found = score(record[what], past)
            if found > self.config.threshold:
                return Spike(record["step"], what, record[what], middle, found)
        return None

    def accept(self, records: Sequence[Record]) -> None:
        """The steps join the past, whatever they are; those that were skipped because they are not finite do not."""
        values = [[record[what] for what in WATCHED] for record in records if _counts(record)]
        self.past = [*self.past, *values][-self.config.window :]

    def rollback(self, spike: Spike, checkpoint: int, tokens: int, order: Order, batch_sequences: int) -> Rollback:
        """To a checkpoint that had consumed so many tokens, without the batches of the spike.

        order: in which the spike was met. The batches lie after the checkpoint."""
        length, config = order.sequence_length, self.config
        sample = -(-tokens // length) + (spike.step - 1 - config.before - checkpoint) * batch_sequences
        last = sample + (config.before + 1 + config.after) * batch_sequences - 1
        first, last = order.unskipped(np.array([sample, last])).tolist()
        return Rollback(**asdict(spike), checkpoint=checkpoint, first=first, stop=last + 1, sequence_length=length)

    def write(self) -> None:
        """Leaves all rollbacks in the run's folder, where a start finds those that its checkpoint does not know."""
        write_text(self.path, "".join(f"{to_line(asdict(rollback))}\n" for rollback in self.rollbacks))

    def without(self, order: Order) -> Order:
        """The order without what was left out so far. Samples of another length are others."""
        ranges = [(back.first, back.stop) for back in self.rollbacks if back.sequence_length == order.sequence_length]
        return replace(order, left_out=tuple(ranges))

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it: JSON values."""
        return {"past": self.past, "rollbacks": [asdict(rollback) for rollback in self.rollbacks]}

    def load(self, state: dict[str, Any] | None, written: Sequence[Rollback]) -> None:
        """state: of a checkpoint, None if an older version saved it; written: what the run's folder has, which is all
        there is, or nothing where the run has not gone back itself."""
        state = state or {"past": [], "rollbacks": []}
        saved = [Rollback(**rollback) for rollback in state["rollbacks"]]
        self.past = state["past"][-self.config.window :]
        self.rollbacks = list(written) if len(written) > len(saved) else saved

    def written(self) -> list[Rollback]:
        """What rollbacks.jsonl has. For rank 0."""
        return [Rollback(**record) for record in read(self.path)]


def _counts(record: Record) -> bool:
    return math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
