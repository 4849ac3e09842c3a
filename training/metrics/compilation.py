"""The compilations of a run: those that must come are announced, any other is warned of and counted."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel.apply import Spread
from parallel.compile import allow_graphs, listen

GRAPH = re.compile(r"^\d+/\d+: ")  # the number Dynamo gives to the graph that did not fit


@dataclass
class Pass:
    """A forward pass and the backward pass that follows it; with a pipeline all those of a step."""

    what: str
    expected: bool
    compiling_since: float = 0.0
    seconds: float = 0.0  # of compiling
    reasons: list[str] = field(default_factory=list)


class Compilations:
    """What torch.compile does in this process while the run computes.

    A pass of an expected shape compiles when it comes for the first time. A backward pass can compile as late as it
    runs, so a pass is told of when the next one begins or the metrics are read."""

    def __init__(self, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self.say, self.warn = say, warn
        self.recompiles = 0
        self._expected: dict[tuple[int, ...], str] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._now: Pass | None = None
        self._variants = 1
        listen(self._started, self._ended)

    def expect(self, what: str, shape: tuple[int, int], gradients: bool) -> None:
        """Passes of tokens of this shape, [sequences, tokens], will come."""
        self._expected[*shape, gradients] = f"{what} {list(shape)}"
        allow_graphs(len(self._expected) * self._variants)

    def expect_anew(self) -> None:
        """Something changed that each graph has fixed: every expected pass may compile once more."""
        self._seen.clear()
        self._variants += 1
        allow_graphs(len(self._expected) * self._variants)

    def begin(self, shape: torch.Size) -> None:
        """A pass of tokens of this shape begins."""
        self.settle()
        kind = (*shape, torch.is_grad_enabled())
        new = kind in self._expected and kind not in self._seen
        self._seen.add(kind)
        self._now = Pass(self._expected.get(kind, f"{list(shape)}, not a shape of this run"), new)

    def settle(self) -> int:
        """Tells of what the last pass compiled. Returns how many passes compiled that should not have."""
        last, self._now = self._now, None
        if last is None or last.seconds == 0.0:
            return self.recompiles
        if last.expected:
            self.say(f"compiled in {last.seconds:.1f} s")
        else:
            self.recompiles += 1
            why = "; ".join(last.reasons) or "code that was not compiled before"
            self.warn(f"recompiled in {last.seconds:.1f} s for {last.what}: {why}")
        return self.recompiles

    def _started(self, reasons: list[str]) -> None:
        if self._now is None:
            return
        if self._now.expected and self._now.seconds == 0.0:
            self.say(f"compiling for {self._now.what} ...")
        self._now.reasons += [GRAPH.sub("", reason).splitlines()[0] for reason in reasons]
        self._now.compiling_since = time.perf_counter()

    def _ended(self) -> None:
        if self._now is not None:
            self._now.seconds += time.perf_counter() - self._now.compiling_since


@dataclass
class Watched(Spread):
    """A compiled model whose compilations are told of."""

    compilations: Compilations = field(kw_only=True)

    def forward(self, **inputs: Tensor | str | None) -> Tensor:
        tokens = inputs["tokens"]
        assert isinstance(tokens, Tensor)
        self.compilations.begin(tokens.shape)
        result = super().forward(**inputs)
        if not torch.is_grad_enabled():
            self.compilations.settle()  # no backward pass follows
        return result

    def step(self, micro_batches: list[dict[str, Any]], divisor: Tensor) -> Tensor:
        self.compilations.begin(micro_batches[0]["tokens"].shape)
        return super().step(micro_batches, divisor)


def expect(spread: Spread, what: str, shape: tuple[int, int], gradients: bool) -> None:
    """Of a model that is not compiled nothing is expected."""
    if isinstance(spread, Watched):
        spread.compilations.expect(what, shape, gradients)


def expect_anew(spread: Spread) -> None:
    if isinstance(spread, Watched):
        spread.compilations.expect_anew()


def recompiles(spread: Spread) -> int:
    """So far, in this start of the run and on this rank."""
    return spread.compilations.settle() if isinstance(spread, Watched) else 0
