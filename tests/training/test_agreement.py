"""One rank is broken on purpose, and what differs is named, with its kind and the ranks; a healthy one is left alone."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.local import local
from parallel.mesh import data_coordinate, start_process_group
from parallel.replicas import ReplicasDiffer
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, WatchedStep, build, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.agreement import Agreement
from training.config import Config

# By the number of ranks. In the last column: who holds the same as the last rank.
LAYOUTS = {
    2: [
        (layout(2, "parallel=ddp"), "rank 0"),
        (layout(2, "parallel=zero1"), ""),
        (layout(2, "parallel=fsdp2"), ""),
        (layout(2, "parallel=hsdp", 1), "rank 0"),
    ],
    4: [
        (layout(4, "parallel=ddp"), "ranks 0, 1, 2"),
        (layout(4, "parallel=fsdp2"), ""),
        (layout(4, "parallel=hsdp", 2), "rank 1"),
    ],
}
ACCUMULATION = 3
PARAMETER, GRADIENT, MOMENT = "blocks.1.attention.qkv.weight", "norm.weight", "embed.tokens.weight.exp_avg_sq"
HEALTHY = "healthy"


def flip(tensor: Tensor) -> None:
    """Another bit in the last value that is here."""
    local(tensor.detach()).view(torch.int64).view(-1)[-1] ^= 1 << 50


def break_parameter(step: WatchedStep) -> None:
    flip(step.spread.model.get_parameter(PARAMETER))


def break_moment(step: WatchedStep) -> None:
    flip(step.optimizer.tensors()[MOMENT])


def break_count(step: WatchedStep) -> None:
    step.optimizer.tensors()["norm.bias.step"] += 1


def untie(step: WatchedStep) -> None:
    head = step.spread.model.head
    assert head is not None
    head.weight = nn.Parameter(head.weight.detach().clone())


def break_gradient(step: WatchedStep) -> None:
    """Once it is summed over ranks."""
    parameter, backward = step.spread.model.get_parameter(GRADIENT), step.backward

    def broken(*args):
        result = backward(*args)
        assert parameter.grad is not None
        flip(parameter.grad)
        return result

    step.backward = broken  # type: ignore[method-assign]


BREAK: dict[str, Callable[[WatchedStep], None]] = {
    f"parameter {PARAMETER}": break_parameter,
    f"gradient of {GRADIENT}": break_gradient,
    f"optimizer state {MOMENT}": break_moment,
    "optimizer state norm.bias.step": break_count,
    "tied weight head.weight": untie,
}


def told(config: Config) -> dict[str, str]:
    """What is raised in the second step of three, where the last rank has been broken before it."""
    start_process_group(CPU, timeout_seconds=60)
    mesh, found = mesh_of(config, {}), {}
    last, (rank, ranks) = dist.get_rank() == dist.get_world_size() - 1, data_coordinate(mesh)
    for kind in [HEALTHY, *BREAK]:
        if kind == "tied weight head.weight" and config.parallel.strategy.name == "fsdp2":
            continue  # FSDP2 itself puts the one parameter in both places
        spread, step = build(config, mesh)
        agreement = Agreement(spread.model, mesh, step.optimizer)
        found[kind] = ""
        for number in range(3):
            if number == 1 and last and kind != HEALTHY:
                BREAK[kind](step)
            assert isinstance(config.micro_batch, int)
            mine = list(slices(batches()[number], rank, ranks, config.micro_batch))
            count = sum(int((micro.labels != -100).sum()) for micro in mine)
            try:
                step([{"tokens": m.tokens, "labels": m.labels} for m in mine], count, 0.01, agreement)
            except ReplicasDiffer as error:
                found[kind] = f"{number}: {error}"
                break
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("layout", "others"), [case for cases in LAYOUTS.values() for case in cases], ids=str)
def test_a_broken_rank_is_named(layout: Layout, others: str) -> None:
    config = config_of(Case(layout, ACCUMULATION, Training("tied", "adamw", "fp64")))
    every = {0: "rank 0", 2: "ranks 0, 1, 2"}[layout.ranks - 2]
    for found in run_ranks(layout.ranks, told, config):
        assert found.pop(HEALTHY) == ""
        for kind, message in found.items():
            of_all = "step" in kind or "tied" in kind  # every rank holds it
            against = every if of_all else others
            if against == "":  # each rank has values of its own
                assert message == "", kind
            else:
                assert message.startswith("1: ranks that should hold the same do not:\n"), kind
                assert f"\n{kind}: rank {layout.ranks - 1} differs from {against}" in message
                assert kind.startswith(("parameter", "optimizer")) or message.count("\n") == 1  # and nothing else
