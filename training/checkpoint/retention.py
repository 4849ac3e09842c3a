"""Which checkpoints may go. Pure, so that it can be tested without a file: what a run decides after a restart follows
from the checkpoints alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Kinds that only serve a restart; a newer checkpoint of any kind takes their place.
EPHEMERAL = ("ephemeral", "signal", "test")


@dataclass(frozen=True)
class Policy:
    """keep: so many of the newest stay. best_of: also the one with the best score, such as "heldout.loss"."""

    keep: int
    best_of: str | None = None
    highest: bool = False


@dataclass(frozen=True)
class StepInfo:
    """What retention looks at of a complete checkpoint. score: of what the policy names; None where it has none."""

    step: int
    permanent: bool
    ephemeral: bool = False
    score: float | None = None


def to_delete(steps: list[StepInfo], policy: Policy) -> list[int]:
    """Steps to delete, oldest first, so that the `keep` newest that are neither permanent nor ephemeral stay.

    `steps` are the complete checkpoints in any order; incomplete ones are not counted. The newest of all, the permanent
    ones and the best always stay, also with keep = 0; an ephemeral one only where it is the newest of all.
    """
    if not steps:
        return []
    passing = sorted(info.step for info in steps if not info.permanent and not info.ephemeral)
    stay: set[int | None] = {max(info.step for info in steps), best(steps, policy.highest)}
    stay |= {info.step for info in steps if info.permanent}
    stay |= set(passing[max(len(passing) - policy.keep, 0) :])
    return sorted(info.step for info in steps if info.step not in stay)


def best(steps: list[StepInfo], highest: bool) -> int | None:
    """The step with the best score, the newest of equal ones; None where there are no scores that are numbers."""
    scored = [
        (info.score if highest else -info.score, info.step)
        for info in steps
        if info.score is not None and not math.isnan(info.score)
    ]
    return max(scored)[1] if scored else None


def score_of(scores: Mapping[str, Any] | None, name: str) -> float | None:
    """The value of "heldout.loss" in the scores of a checkpoint."""
    for line in (scores or {}).get("scores", []):
        if f"{line['task']}.{line['metric']}" == name:
            return float(line["value"])
    return None
