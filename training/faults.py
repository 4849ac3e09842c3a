"""Signals, time limits and the clock of ephemeral checkpoints: flags that the ranks agree on, looked at between steps
and between batches of an evaluation."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from training.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# in the place of a signal's number
TIME_LIMIT, SLURM_LIMIT = 1000, 1001
LIMITS = {TIME_LIMIT: "max_minutes", SLURM_LIMIT: "the end of its Slurm job"}
# a second Ctrl-C after this long ends the process at once; sooner it is the launcher's copy of the first
PATIENCE_SECONDS = 3.0

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was asked to stop. `cause` says by what."""

    def __init__(self, number: int) -> None:
        self.cause = LIMITS[number] if number in LIMITS else signal.Signals(number).name
        super().__init__(self.cause)


class StopRequest:
    """Turns signals, limits and rank 0's clock into one decision of all ranks.

    save_due: whether `every_minutes` have passed since the last save, as of the last poll; the same on every rank.
    background_saves: so many have ended on every rank, as of the last poll; the same on every rank.

    Until `watch_steps` is called there is nothing to save (a run being built, compiled or resumed), and a signal ends
    the run at once by raising Stopped.

    job_end: when Slurm ends the job, in seconds since the epoch; a save is begun so early that it is done by then, and
    `grace_seconds` before it at the latest.
    """

    def __init__(
        self,
        max_minutes: float | None,
        every_minutes: float | None = None,
        job_end: float | None = None,
        grace_seconds: float = 0.0,
    ) -> None:
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.job_end, self.grace_seconds = job_end, grace_seconds
        self.save_seconds = 0.0  # of the last one
        self.polled_at = 0.0
        self.ranks = Ranks.alone()
        self.received = 0
        self.received_at = 0.0
        self.stepping = False
        self.save_due = False
        self.background_saves = 0
        self._background_saves: Callable[[], int] = lambda: 0
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

    def watch_steps(self, ranks: Ranks, background_saves: Callable[[], int] = lambda: 0) -> None:
        """From now on a signal waits for the next poll. background_saves: how many have ended on this rank."""
        self.ranks, self._background_saves = ranks, background_saves
        self.stepping = True
        self._saved_at = time.monotonic()
        self.polled_at = time.time()

    def saved(self) -> None:
        """On every rank after each save: the clock begins anew."""
        self._saves += 1
        self._saved_at = time.monotonic()
        self.save_due = False

    def poll(self) -> Stopped | None:
        """A collective, once a step: the reason to stop, the same on every rank. With several ranks the answer is one
        poll late, so that nobody waits for it."""
        if not self.received:
            self.received = self._limit_reached()
        if self.ranks.size == 1:
            self.save_due = self._wanted_save() > self._saves
            self.background_saves = self._background_saves()
            return Stopped(self.received) if self.received else None
        agreed = 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            agreed, wanted_save, fewest_saves = flags.tolist()
            self.background_saves = -fewest_saves
            self.save_due = wanted_save > self._saves
        flags = torch.tensor([self.received, self._wanted_save(), -self._background_saves()])
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.ranks.group, async_op=True))
        return Stopped(agreed) if agreed else None

    def _wanted_save(self) -> int:
        """The number of the save that rank 0's clock asks for; 0 if none. An answer that comes after that save was made
        asks for no other."""
        if self._save_seconds is None or self.ranks.rank != 0:
            return 0
        return self._saves + 1 if time.monotonic() - self._saved_at >= self._save_seconds else 0

    def _limit_reached(self) -> int:
        """TIME_LIMIT, SLURM_LIMIT or 0."""
        now = time.time()
        between, self.polled_at = now - self.polled_at, now
        if self.deadline is not None and time.monotonic() > self.deadline:
            return TIME_LIMIT
        # What the next poll flags is agreed on at the one after it, and the save begins then.
        needed = 2 * between + max(self.grace_seconds, self.save_seconds)
        return SLURM_LIMIT if self.job_end is not None and now + needed > self.job_end else 0

    def note_save(self, step: int, seconds: float) -> None:
        """To be told of each save. Warns of the first that takes longer than the machine may give."""
        if self.ranks.rank == 0 and seconds > self.grace_seconds >= self.save_seconds:
            log.warning(
                "saving step %s took %.1f s: a machine that is taken away checkpoint.grace_seconds=%g after its notice "
                "does not finish it",
                f"{step:,}",
                seconds,
                self.grace_seconds,
            )
        self.save_seconds = seconds

    def check(self) -> None:
        """poll(), raising what it returns."""
        stopped = self.poll()
        if stopped is not None:
            raise stopped
