"""What an evaluation is made of: rows of tokens to score, and the scores made from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORED = -100  # label of a position that is not scored


@dataclass(frozen=True)
class Score:
    """One number of one task.

    `n` is the count of what the value is a mean over, `stderr` its standard error where it has one, `items_hash` a
    sha256 of what was scored: two values compare only where it is the same.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    items_hash: str


@dataclass(frozen=True)
class Rows:
    """The sequences a task scores.

    `make(first, stop)` gives tokens and labels of these rows, int64 [stop - first, width]: the label at a position is
    the token that follows, or IGNORED where it is not scored.
    """

    count: int
    width: int
    end_of_text: int
    make: Callable[[int, int], tuple[np.ndarray, np.ndarray]]


class Task(Protocol):
    """One task of the suite. Everything but the losses of its rows is the same on every rank."""

    rows: Rows

    def scores(self, nats: np.ndarray) -> list[Score]:
        """`nats`: float64 [rows, 2], the summed loss of each row: of all its labels, and of all but end-of-text."""
        ...
