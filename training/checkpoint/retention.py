"""Which checkpoints may go. Pure, so that it can be tested without a file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepInfo:
    """What retention looks at of a complete checkpoint."""

    step: int
    permanent: bool


def to_delete(steps: list[StepInfo], keep: int) -> list[int]:
    """Steps to delete, oldest first, so that the `keep` newest that are not permanent stay.

    `steps` are the complete checkpoints in any order; incomplete ones are not counted. The newest of all and the
    permanent ones always stay, also with keep = 0.
    """
    if not steps:
        return []
    newest = max(info.step for info in steps)
    passing = sorted(info.step for info in steps if not info.permanent)
    return [step for step in passing[: max(len(passing) - keep, 0)] if step != newest]
