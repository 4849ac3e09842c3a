"""Signals, time limits and the clock of ephemeral checkpoints: flags that the ranks agree on, looked at between steps
and between batches of an evaluation."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from training.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TIME_LIMIT = 1000  # in the place of a signal's number
# a second Ctrl-C after this long ends the process at once; sooner it is the launcher's copy of the first
PATIENCE_SECONDS = 3.0


class Stopped(Exception):
    """The run was asked to stop. `cause` says by what."""

    def __init__(self, number: int) -> None:
        self.cause = "max_minutes" if number == TIME_LIMIT else signal.Signals(number).name
        super().__init__(self.cause)


class StopRequest:
    """Turns signals, the limit and rank 0's clock into one decision of all ranks.

    save_due: whether `every_minutes` have passed since the last save, as of the last poll; the same on every rank.

    Until `watch_steps` is called there is nothing to save (a run being built, compiled or resumed), and a signal ends
    the run at once by raising Stopped.
    """

    def __init__(self, max_minutes: float | None, every_minutes: float | None = None) -> None:
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.ranks = Ranks.alone()
        self.received = 0
        self.received_at = 0.0
        self.stepping = False
        self.save_due = False
        self._save_seconds = None if every_minutes is None else 60 * every_minutes
        self._saved_at = 0.0
        self._saves = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Our signal handlers, and the former ones afterwards."""
        former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.received == number == signal.SIGINT and time.monotonic() - self.received_at > PATIENCE_SECONDS
        if again:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.received_at = number, time.monotonic()
        if not self.stepping:
            raise Stopped(number)

    def watch_steps(self, ranks: Ranks) -> None:
        """From now on a signal waits for the next poll."""
        self.ranks = ranks
        self.stepping = True
        self._saved_at = time.monotonic()

    def saved(self) -> None:
        """On every rank after each save: the clock begins anew."""
        self._saves += 1
        self._saved_at = time.monotonic()
        self.save_due = False

    def poll(self) -> Stopped | None:
        """A collective, once a step: the reason to stop, the same on every rank. With several ranks the answer is one
        poll late, so that nobody waits for it."""
        if self.deadline is not None and not self.received and time.monotonic() > self.deadline:
            self.received = TIME_LIMIT
        if self.ranks.size == 1:
            self.save_due = self._wanted_save() > self._saves
            return Stopped(self.received) if self.received else None
        agreed = 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            agreed, wanted_save = flags.tolist()
            self.save_due = wanted_save > self._saves
        flags = torch.tensor([self.received, self._wanted_save()])
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.ranks.group, async_op=True))
        return Stopped(agreed) if agreed else None

    def _wanted_save(self) -> int:
        """The number of the save that rank 0's clock asks for; 0 if none. An answer that comes after that save was made
        asks for no other."""
        if self._save_seconds is None or self.ranks.rank != 0:
            return 0
        return self._saves + 1 if time.monotonic() - self._saved_at >= self._save_seconds else 0

    def check(self) -> None:
        """poll(), raising what it returns."""
        stopped = self.poll()
        if stopped is not None:
            raise stopped
