"""What is said to a user whose run cannot start: all problems at once, each with what to write instead."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One reason not to start. `key` is the config key (or the word as typed), `instead` what to write."""

    key: str
    value: Any
    reason: str
    instead: str

    def __str__(self) -> str:
        shown = self.key if self.value == "" else f"{self.key}={self.value}"
        return f"{shown}: {self.reason}\n    instead: {self.instead}"


class Refusal(Exception):
    """Raised before the first step; train.py prints it without a traceback and exits with 2."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"Not started: {count}.", *(f"  {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type["Refusal"], tuple[list[Problem]]]:
        return Refusal, (self.problems,)  # pickled between ranks


def refuse(problems: list[Problem]) -> None:
    if problems:
        raise Refusal(problems)
