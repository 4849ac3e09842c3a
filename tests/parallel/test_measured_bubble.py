"""The measured bubble of stages whose passes last as long as they are told to, against the simulated one."""

import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.config import ModelConfig
from parallel.bubble import orders, simulate
from parallel.config import ParallelConfig, Schedule
from parallel.mesh import build_mesh, start_process_group
from parallel.pipeline import Pipeline, stages_here
from parallel.planning.stages import stages_per_rank
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SECONDS = 0.12  # of a forward pass, of the gradient of its input and of that of its weights
MICRO_BATCHES = 4
FEW = {Schedule["interleaved_zero_bubble"]: 2, Schedule["zbv"]: 2}  # with more their bubble is hardly there
STEPS = 3
CASES = [(2, name, longest) for name in Schedule.__members__ for longest in ("even", "last stage twice as long")]
CASES += [(4, name, "even") for name in ("1f1b", "interleaved_zero_bubble", "zbv")]


class Wait(torch.autograd.Function):
    """The identity, whose passes take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        time.sleep(forward)
        ctx.seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Slow(nn.Module):
    """A stage: one path to its input, one to its weight, so that a schedule can take them apart."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last, self.seconds = first, last, 0.0
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *stream: Tensor, tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...] | Tensor:
        x = tokens.unsqueeze(-1).expand(*tokens.shape, 4).double().requires_grad_() if self.first else stream[0]
        y = Wait.apply(x, self.seconds, self.seconds) + Wait.apply(self.weight, 0.0, self.seconds)
        return (y * torch.ones_like(y)).sum().reshape(1) if self.last else (y,)  # a gradient that can be sent


def measured(parallel: ParallelConfig, count: int, seconds: dict[int, float]) -> list[float]:
    """Of several steps of so many micro-batches."""
    start_process_group(CPU, 60)
    mesh = build_mesh(parallel, CPU)
    model = ModelConfig(layers=parallel.pp * stages_per_rank(parallel), dim=4, vocab_size=7)
    slow = {stage.index: Slow(stage.first, stage.last).double() for stage in stages_here(model, parallel, mesh)}
    passes: dict[int, nn.Module] = dict(slow)
    pipeline = Pipeline(passes, model, parallel, mesh, torch.float64, CPU)
    batch = {"tokens": torch.ones(1, 2, dtype=torch.long), "labels": torch.ones(1, 2, dtype=torch.long)}

    def step() -> float:
        dist.barrier()  # as the gradient's norm does at the end of each step
        pipeline.backward([batch] * count, torch.ones(()))
        return pipeline.bubble_share()

    step()  # connects
    for index, stage in slow.items():
        stage.seconds = seconds[index]
    return [step() for _ in range(STEPS)]


@pytest.mark.timed
@pytest.mark.parametrize(("pp", "name", "longest"), CASES)
def test_the_measured_bubble_is_the_simulated_one(pp: int, name: str, longest: str) -> None:
    """The median of the steps on each rank, of at most three tries: what else the machine does disturbs some, and only
    lengthens them. Sending costs nothing in the simulation and some milliseconds here."""
    parallel = ParallelConfig(pp=pp, schedule=Schedule[name])
    number = parallel.pp * stages_per_rank(parallel)
    seconds = dict.fromkeys(range(number), SECONDS)
    if longest != "even":
        seconds = dict.fromkeys(seconds, SECONDS / 2) | {number - 1: SECONDS}
    few = FEW.get(parallel.schedule, MICRO_BATCHES)
    count = few if pp == 2 else 4
    expected = simulate(orders(parallel, count), seconds)
    for _ in range(3):
        found = run_ranks(pp, measured, parallel, count, seconds)
        if all(median(of_rank) == pytest.approx(expected, rel=0.1) for of_rank in found):
            return
    raise AssertionError(f"expected {expected}, found {found}")
