"""How long the ranks of a pipeline wait for each other: simulated before a run, from the order in which the schedule
takes the passes and from what each stage costs; and measured in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from models.config import ModelConfig
from parallel.config import ParallelConfig, Reduce, Schedule, Strategy
from parallel.planning.stages import SPLIT, costs, runs, stages, stages_per_rank

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


def orders(parallel: ParallelConfig, micro_batches: int) -> list[list[Turn]]:
    """The turns of each rank in the order of the schedule."""
    if parallel.schedule is Schedule["1f1b"]:  # torch's own account of it is not what it does
        return [_one_forward_one_backward(rank, parallel.pp, micro_batches) for rank in range(parallel.pp)]
    # private; seen on torch 2.11 and 2.15
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    each = stages_per_rank(parallel)
    of_ranks: Any = get_schedule_ops(parallel.schedule.value, parallel.pp, micro_batches, each)
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


def simulate(order: list[list[Turn]], seconds: dict[int, float]) -> float:
    """The share of the ranks' time in which they wait, from first pass to last. seconds: of each stage's forward pass
    of a micro-batch; sending costs nothing. Raises ValueError where the order can never end."""
    there = {one for turns in order for turn in turns for one in turn}
    ended: dict[Pass, float] = {}
    clocks, places = [0.0] * len(order), [0] * len(order)
    busy, last = 0.0, max(seconds)
    while any(place < len(turns) for place, turns in zip(places, order, strict=True)):
        progressed = False
        for rank, turns in enumerate(order):
            while places[rank] < len(turns):
                turn, now = turns[places[rank]], clocks[rank]
                needs = [_needs(one, last, there) for one in turn]
                if any(need not in ended for needed in needs for need in needed):
                    break
                for one, needed in zip(turn, needs, strict=True):
                    cost = (COST if one.stage > 0 else COST_OF_FIRST)[one.kind] * seconds[one.stage]
                    now = max([now, *(ended[need] for need in needed)]) + cost
                    busy += cost
                ended |= dict.fromkeys(turn, now)
                clocks[rank] = now
                places[rank] += 1
                progressed = True
        if not progressed:
            raise ValueError("the passes wait for each other in a circle")
    return 1 - busy / (len(order) * max(clocks))


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
    return simulate(orders(parallel, micro_batches), costs(model, stages(model, parallel)))


def smaller_bubbles(model: ModelConfig, parallel: ParallelConfig, micro_batches: int) -> list[tuple[str, float]]:
    """What would shrink it, best first: words to write, and the share with them."""
    found = []
    if runs(parallel, 2 * micro_batches):
        found.append(("twice the micro-batches", bubble(model, parallel, 2 * micro_batches)))
    for schedule in Schedule:
        whole = parallel.reshard_after_forward is False or parallel.strategy is not Strategy.fsdp2
        other = replace(parallel, schedule=schedule, stages_per_rank=None, stage_layers=None)
        usable = schedule not in SPLIT or (whole and parallel.reduce is not Reduce.micro_batch)
        enough = model.layers >= other.pp * stages_per_rank(other)
        if schedule is not parallel.schedule and usable and enough and runs(other, micro_batches):
            found.append((f"parallel.schedule={schedule.name}", bubble(model, other, micro_batches)))
    now = bubble(model, parallel, micro_batches)
    return sorted([way for way in found if way[1] < 0.95 * now], key=lambda way: way[1])


class Clock:
    """Seconds in which this rank computes passes, and those of whole schedules, read together and rarely: on a GPU they
    are known only when the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.intervals: dict[str, list[tuple[Any, Any]]] = {"busy": [], "all": []}

    def _now(self) -> Any:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        begin = self._now()
        yield
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
