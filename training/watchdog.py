"""A thread of each rank that sees when no rank gets on, says who waits for whom, and ends the run.

Ranks that hang cannot answer over the collectives they hang in, so all goes through the store of torch.distributed.
Each rank leaves its newest sign of life there, the place it has come to; rank 0 compares, and asks all ranks where they
are when no sign has changed for too long."""

import faulthandler
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

HUNG = 3  # the exit code
LOOKS = 20  # a look every so many parts of the limit
LONGEST_PAUSE = 10.0  # seconds between looks
ANSWER_SECONDS = 5.0  # that ranks have to say where they are, and again to leave their stacks
TORCH = str(Path(torch.__file__).parent)
COLLECTIVES = str(Path(dist.__file__).parent)


@dataclass
class Progress:
    """Where the steps of this rank are. All ranks pass the same places, so that they can be compared by number."""

    step: int = 0
    phase: str = "the start"
    places: int = 0  # passed so far

    def at(self, phase: str) -> None:
        self.phase = phase
        self.places += 1


@dataclass(frozen=True)
class Account:
    """What a rank says when it is asked."""

    step: int
    phase: str
    places: int
    waits_in: str  # the collective and who called it; "" where it is seen to wait in none


class Watchdog:
    """Ends this process, and all others alike, with HUNG when no rank has got on for `limit` seconds and some wait for
    others: in a collective, or further on than others are. Ranks that are all busy are left alone."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        progress: Progress,
        more: Callable[[], int],
        limit: float,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        """more: what else changes while a rank gets on. folder: for stacks. tell: how rank 0 says what was found."""
        self.rank, self.ranks, self.progress, self.more = rank, ranks, progress, more
        self.limit = limit  # may be changed at any time
        self.folder, self.tell = folder, tell
        # a connection of its own: the main thread may wait in its
        self.store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.left = ""  # this rank's newest sign
        self.seen: list[bytes] = []  # rank 0: of all ranks
        self.changed = time.monotonic()
        self.asked = 0  # so often
        self.answering: list[int] = []  # rank 0: who did

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        try:
            while not self.ended.wait(min(self.limit / LOOKS, LONGEST_PAUSE)):
                self._look()
        except RuntimeError:  # torch's error where the store is gone: its rank has ended, and the others learn it
            return

    def _look(self) -> None:
        sign = f"{self.progress.places} {self.more()} {waits_in()}"
        if sign != self.left:
            self.store.set(f"sign {self.rank}", sign)
            self.left = sign
        if self.rank == 0:
            self._compare()
        elif self.store.check([f"asked {self.asked + 1}"]):
            self.asked += 1
            self._answer()
        if self.store.check(["hangs"]):
            self._end()

    def _compare(self) -> None:
        """Asks all ranks when nothing has changed for too long, and decides."""
        names = [f"sign {rank}" for rank in range(self.ranks)]
        signs = self.store.multi_get(names) if self.store.check(names) else []
        if signs != self.seen:
            self.seen, self.changed = signs, time.monotonic()
        seconds = time.monotonic() - self.changed
        if seconds < self.limit:
            return
        self.asked += 1
        self.store.set(f"asked {self.asked}", "")
        self._answer()
        accounts = self._answers(f"account {self.asked}")
        told = describe(accounts)
        if told is None:
            self.changed = time.monotonic()
            return
        self.answering = [rank for rank, account in enumerate(accounts) if account is not None]
        where = f"what each was doing is in {self.folder}"
        self.tell(f"no rank has got on for {seconds:.0f} s: {told}; {where}")
        self.store.set("hangs", "")

    def _answer(self) -> None:
        account = Account(self.progress.step, self.progress.phase, self.progress.places, waits_in())
        self.store.set(f"account {self.asked} {self.rank}", json.dumps(asdict(account)))

    def _answers(self, name: str) -> list[Account | None]:
        """Of each rank that answers in time."""
        keys = [f"{name} {rank}" for rank in range(self.ranks)]
        self._wait(keys)
        return [Account(**json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _wait(self, keys: list[str]) -> None:
        until = time.monotonic() + ANSWER_SECONDS
        while not self.store.check(keys) and time.monotonic() < until:
            time.sleep(0.02)

    def _end(self) -> None:
        """Leaves the stacks and ends the process, rank 0's last: a launcher kills all when one has ended."""
        try:
            self._leave_stacks()
            self.store.set(f"left {self.rank}", "")
            if self.rank == 0:
                self._wait([f"left {rank}" for rank in self.answering])
                self.store.set("end", "")
                time.sleep(0.2)  # the store may be in this process
            else:
                self._wait(["end"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(HUNG)  # the main thread cannot be woken

    def _leave_stacks(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"rank{self.rank}.txt", "w") as file:
            file.write(f"rank {self.rank}, process {os.getpid()}, step {self.progress.step}, {self.progress.phase}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        (self.folder / f"rank{self.rank}.json").write_bytes(flight_record())


def flight_record() -> bytes:
    """torch's account of the last collectives, as JSON. Private; seen on torch 2.11 and 2.15."""
    from torch._C import _distributed_c10d

    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    dump = getattr(_distributed_c10d, name, lambda: b"{}")
    found: bytes = dump()
    return found


def waits_in() -> str:
    """The collective in which this process waits and what called it, as far as its stacks say: a thread whose innermost
    call is one of torch.distributed, or a line that waits. "" where there is none."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda thread: thread != main):
        if thread != threading.get_ident() and (found := _waits_in(frames[thread])):
            return found
    return ""


def _waits_in(inner: FrameType) -> str:
    line = linecache.getline(inner.f_code.co_filename, inner.f_lineno)
    in_torch = inner.f_code.co_filename.startswith(COLLECTIVES)
    if not in_torch and ".wait(" not in line:
        return ""
    caller: FrameType | None = inner
    while caller is not None and caller.f_code.co_filename.startswith(TORCH):
        caller = caller.f_back
    if caller is None:
        return ""
    place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    name = inner.f_code.co_name if in_torch else "wait"
    return f"{name}, called by {caller.f_code.co_name} ({place})"


def describe(accounts: Sequence[Account | None]) -> str | None:
    """Who is waited for and who waits in what, in words. None where nobody is seen to wait: all are busy."""
    known = [account for account in accounts if account is not None]
    least = min((account.places for account in known), default=0)
    if len(known) == len(accounts) and not any(account.waits_in or account.places > least for account in known):
        return None
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, account in enumerate(accounts):
        groups.setdefault(_state(account, least), []).append(rank)
    told = [f"{ranks_told(ranks)} {state}" for (_, state), ranks in sorted(groups.items())]
    return "; ".join(told)


def _state(account: Account | None, least: int) -> tuple[int, str]:
    """In words that fit one rank or several, and its place in the order of what is told."""
    if account is None:
        return 0, "gave no answer"
    where = f"in step {account.step}, {account.phase}"
    if account.waits_in:
        return 2, f"waiting in {account.waits_in} {where}"
    return (3, f"ahead {where}") if account.places > least else (1, f"waited for {where}")


def ranks_told(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 2-7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
