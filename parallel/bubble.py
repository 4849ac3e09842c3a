"""How long the ranks of a pipeline wait for each other: simulated before a run, from the order in which the schedule
takes the passes and from what each stage costs; and measured in it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any

import torch

from models.config import ModelConfig
from parallel.config import ParallelConfig, Schedule
from parallel.planning.stages import costs, extrapolated, stages, stages_per_rank, unsplit

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}  # torch's names
# Of a forward pass of the same stage: gradients of inputs and of weights cost as much each.
COST = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
# The first stage has no input that needs a gradient: torch does all of its backward pass with the weights.
COST_OF_FIRST = {"F": 1.0, "I": 0.0, "W": 2.0, "B": 2.0}


@dataclass(frozen=True)
class Pass:
    """kind: F forward, B backward, or its two parts I (inputs) and W (weights)."""

    kind: str
    stage: int
    micro_batch: int


Turn = tuple[Pass, ...]  # passes whose results are sent together, after the last of them


def orders(parallel: ParallelConfig, micro_batches: int, whole: int | None = None) -> list[list[Turn]]:
    """The turns of each rank in the order of the schedule. whole: the stage that is `unsplit`."""
    if parallel.schedule is Schedule["1f1b"]:  # torch's own account of it is not what it does
        return [_one_forward_one_backward(rank, parallel.pp, micro_batches) for rank in range(parallel.pp)]
    found = _of_torch(parallel.schedule, parallel.pp, stages_per_rank(parallel), micro_batches)
    return found if whole is None else [[_unsplit(turn, whole) for turn in rank] for rank in found]


def _unsplit(turn: Turn, stage: int) -> Turn:
    """The stage's whole backward pass where that of its inputs was."""
    kept = [one for one in turn if (one.kind, one.stage) != ("W", stage)]
    return tuple(replace(one, kind="B") if (one.kind, one.stage) == ("I", stage) else one for one in kept)


@cache
def _of_torch(schedule: Schedule, ranks: int, each: int, micro_batches: int) -> list[list[Turn]]:
    # private; seen on torch 2.11 and 2.15
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import get_schedule_class

    # To place gathers and sends takes torch a time quadratic in the passes, and they are not asked for.
    passes_only = {"_prepare_schedule_with_comms": lambda self, actions: None}
    bare: Any = type("PassesOnly", (get_schedule_class(schedule.value),), passes_only)
    of_ranks: Any = get_schedule_ops(bare, ranks, micro_batches, each)
    turns = [[_turn(action) for action in rank if action is not None] for rank in of_ranks]
    return [[turn for turn in rank if turn] for rank in turns]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Turn]:
    ahead = min(ranks - rank, micro_batches)
    order: list[Turn] = [(Pass("F", rank, number),) for number in range(ahead)]
    for number in range(micro_batches):
        order.append((Pass("B", rank, number),))
        if number + ahead < micro_batches:
            order.append((Pass("F", rank, number + ahead),))
    return order


def _turn(action: Any) -> Turn:
    """Two passes where torch takes a forward and a backward one as one action; none where it computes nothing."""
    if action.sub_actions is not None:
        return tuple(one for part in action.sub_actions for one in _turn(part))
    kind = KINDS.get(action.computation_type.name)
    return () if kind is None else (Pass(kind, action.stage_index, action.microbatch_index),)


def simulate(order: Sequence[Sequence[Turn]], seconds: dict[int, float]) -> float:
    """The share of the ranks' time in which they wait, from first pass to last. seconds: of each stage's forward pass
    of a micro-batch; sending costs nothing. Raises ValueError where the order can never end."""
    busy = sum(_cost(one, seconds) for turns in order for turn in turns for one in turn)
    return 1 - busy / (len(order) * lasts(order, seconds))


def lasts(order: Sequence[Sequence[Turn]], seconds: dict[int, float]) -> float:
    """Seconds from first pass to last."""
    there = {one for turns in order for turn in turns for one in turn}
    ended: dict[Pass, float] = {}
    clocks, places = [0.0] * len(order), [0] * len(order)
    last = max(seconds)
    while any(place < len(turns) for place, turns in zip(places, order, strict=True)):
        progressed = False
        for rank, turns in enumerate(order):
            while places[rank] < len(turns):
                turn, now = turns[places[rank]], clocks[rank]
                needs = [_needs(one, last, there) for one in turn]
                if any(need not in ended for needed in needs for need in needed):
                    break
                for one, needed in zip(turn, needs, strict=True):
                    now = max([now, *(ended[need] for need in needed)]) + _cost(one, seconds)
                ended |= dict.fromkeys(turn, now)
                clocks[rank] = now
                places[rank] += 1
                progressed = True
        if not progressed:
            raise ValueError("the passes wait for each other in a circle")
    return max(clocks)


def _cost(one: Pass, seconds: dict[int, float]) -> float:
    return (COST if one.stage > 0 else COST_OF_FIRST)[one.kind] * seconds[one.stage]


def _needs(one: Pass, last: int, there: set[Pass]) -> list[Pass]:
    stage, micro_batch = one.stage, one.micro_batch
    if one.kind == "F":
        return [Pass("F", stage - 1, micro_batch)] if stage > 0 else []
    if one.kind == "W":
        return [Pass("I", stage, micro_batch)]
    if stage == last:
        return [Pass("F", stage, micro_batch)]
    after = Pass("I", stage + 1, micro_batch)
    return [after if after in there else Pass("B", stage + 1, micro_batch)]


def bubble(model: ModelConfig, parallel: ParallelConfig, micro_batches: int) -> float:
    """The expected share of waiting."""
    cut = stages(model, parallel)
    seconds = costs(model, cut)
    each = COST["F"] + COST["B"]
    work = [each * sum(seconds[stage.index] for stage in cut if stage.rank == rank) for rank in range(parallel.pp)]
    in_one = unsplit(model, parallel)
    whole = extrapolated(lambda count: lasts(orders(parallel, count, in_one), seconds), parallel, micro_batches)
    whole = max(whole, micro_batches * max(work))  # what is extrapolated may be a little less
    return 1 - micro_batches * sum(work) / (parallel.pp * whole)


class Clock:
    """Seconds in which this rank computes passes, and those of whole schedules, read together and rarely: on a GPU they
    are known only when the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.intervals: dict[str, list[tuple[Any, Any]]] = {"busy": [], "all": []}
        self.open: set[str] = set()
        self.begun = 0  # intervals so far

    def _now(self) -> Any:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Of those within one another the outermost counts: two passes may take turns."""
        if what in self.open:
            yield
            return
        self.open.add(what)
        self.begun += 1
        begin = self._now()
        yield
        self.open.remove(what)
        self.intervals[what].append((begin, self._now()))

    def read(self) -> tuple[float, float]:
        """Busy seconds and all, since the last read."""
        if self.on_gpu:
            torch.cuda.synchronize()
        found = []
        for what in ("busy", "all"):
            pairs, self.intervals[what] = self.intervals[what], []
            found.append(sum(a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs))
        return found[0], found[1]
