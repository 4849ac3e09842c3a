"""One rank is broken on purpose: what differs is named, with its kind and the ranks. A healthy run is left alone."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.decoder import Decoder
from parallel.local import local
from parallel.mesh import data_coordinate, start_process_group
from parallel.replicas import ReplicasDiffer
from tests.models.build import tiny
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.agreement import Agreement
from training.config import Config, OptimizerConfig
from training.optimizers.build import build_optimizer
from training.step import Step

# Who holds the same part of a matrix as the last rank, and who of a norm.
LAYOUTS = [
    (layout(2, "parallel=ddp"), "rank 0", "rank 0"),
    (layout(2, "parallel=zero1"), "", ""),
    (layout(2, "parallel=fsdp2"), "", ""),
    (layout(2, "parallel=hsdp", 1), "rank 0", "rank 0"),
    (layout(2, "parallel=tp"), "", "rank 0"),
    (layout(4, "parallel=ddp"), "ranks 0, 1, 2", "ranks 0, 1, 2"),
    (layout(4, "parallel=fsdp2"), "", ""),
    (layout(4, "parallel=hsdp", 2), "rank 1", "rank 1"),
    (layout(4, "parallel=fsdp2 parallel.tp=2"), "", "rank 2"),
    (layout(4, "parallel=ddp parallel.tp=2"), "rank 1", "ranks 0, 1, 2"),
]
ACCUMULATION = 3
PARAMETER, GRADIENT, MOMENT = "blocks.1.attention.qkv.weight", "norm.weight", "embed.tokens.weight.exp_avg_sq"
HEALTHY, TIED = "healthy", "tied weight head.weight"


def flip(tensor: Tensor) -> None:
    """Another bit in the last value that is here."""
    local(tensor.detach()).view(torch.int64).view(-1)[-1] ^= 1 << 50


def break_parameter(step: Step) -> None:
    flip(step.spread.model.get_parameter(PARAMETER))


def break_moment(step: Step) -> None:
    flip(step.optimizer.tensors()[MOMENT])


def break_count(step: Step) -> None:
    step.optimizer.tensors()["norm.bias.step"] += 1


def untie(step: Step) -> None:
    head = step.spread.model.head
    assert head is not None
    head.weight = nn.Parameter(head.weight.detach().clone())


def break_gradient(step: Step) -> None:
    """Once it is summed over ranks."""
    parameter, backward = step.spread.model.get_parameter(GRADIENT), step.backward

    def broken(*args):
        result = backward(*args)
        assert parameter.grad is not None
        flip(parameter.grad)
        return result

    step.backward = broken  # type: ignore[method-assign]


BREAK: dict[str, Callable[[Step], None]] = {
    f"parameter {PARAMETER}": break_parameter,
    f"gradient of {GRADIENT}": break_gradient,
    f"optimizer state {MOMENT}": break_moment,
    "optimizer state norm.bias.step": break_count,
    TIED: untie,
}


def told(config: Config) -> dict[str, str]:
    """What is raised in two healthy steps, and in a third before which the last rank has been broken; each way of
    breaking it begins again from the state after the second."""
    start_process_group(CPU, timeout_seconds=60)
    mesh = mesh_of(config, {})
    spread, watched = build(config, mesh)
    step = Step(spread, mesh, watched.optimizer, config.optimizer.clip)
    agreement = Agreement(spread.model, mesh, step.optimizer)
    found = {HEALTHY: raised(config, step, agreement, 0) + raised(config, step, agreement, 1)}
    state = [local(tensor.detach()) for tensor in (*step.parameters, *step.optimizer.tensors().values())]
    healthy = [tensor.clone() for tensor in state]
    for kind, break_it in BREAK.items():
        if kind == TIED and not config.parallel.torch_ddp:
            continue  # FSDP2 itself puts the one parameter in both places
        if dist.get_rank() == dist.get_world_size() - 1:
            break_it(step)
        found[kind] = raised(config, step, agreement, 2)
        step.zero_grad()
        vars(step).pop("backward", None)
        spread.model.tie()
        for tensor, before in zip(state, healthy, strict=True):
            tensor.copy_(before)
    dist.destroy_process_group()
    return found


def raised(config: Config, step: Step, agreement: Agreement, number: int) -> str:
    rank, ranks = data_coordinate(step.mesh)
    assert isinstance(config.micro_batch, int)
    mine = list(slices(batches()[number], rank, ranks, config.micro_batch))
    count = sum(int((micro.labels != -100).sum()) for micro in mine)
    try:
        step([{"tokens": m.tokens, "labels": m.labels} for m in mine], count, 0.01, agreement)
    except ReplicasDiffer as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("layout", "matrix", "norm"), LAYOUTS, ids=str)
def test_a_broken_rank_is_named(layout: Layout, matrix: str, norm: str) -> None:
    model = "tied" if "tp" not in layout.overrides else "tied for tp"
    config = config_of(Case(layout, ACCUMULATION, Training(model, "adamw", "fp64")))
    others = "rank 0" if layout.ranks == 2 else "ranks 0, 1, 2"
    against = dict(zip(BREAK, (matrix, norm, matrix, others, others), strict=True))
    for found in run_ranks(layout.ranks, told, config):
        assert found.pop(HEALTHY) == ""
        for kind, message in found.items():
            if against[kind] == "":  # each rank has values of its own
                assert message == "", kind
            else:
                assert message.startswith("ranks that should hold the same do not:\n"), kind
                assert f"\n{kind}: rank {layout.ranks - 1} differs from {against[kind]}" in message
                assert kind.startswith(("parameter", "optimizer")) or message.count("\n") == 1  # and nothing else


def test_two_copies_on_one_rank_must_be_alike() -> None:
    """As where the first and the last stage of a pipeline are on the same rank."""
    model = Decoder(tiny(tied_head=True, layers=2, value_embeddings=1), shares=False)
    assert set(model.copies) == {"head.weight", "values.1.table.weight"}
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, len(model.copies.get(name, name)))
        parameter.grad = parameter.detach().clone()
    agreement = Agreement(model, None, build_optimizer(OptimizerConfig(), model))
    agreement.check_gradients()
    agreement.check_state()
    for name, check in (("head.weight", agreement.check_gradients), ("values.1.table.weight", agreement.check_state)):
        parameter = model.get_parameter(name)
        with torch.no_grad():
            (parameter.grad if name == "head.weight" else parameter)[0, 0] += 1  # type: ignore[index]
        with pytest.raises(ReplicasDiffer, match=rf"{name}: differs from"):
            check()
