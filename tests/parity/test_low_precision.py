"""bf16: what single and DDP compute on copies of the weights is what FSDP2's own policy computes."""

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import data_coordinate, start_process_group
from tests.parity.cases import LRS, Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, Whole, build, gather, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.config import Config

WHOLE, CUT = ("tied", "untied", "experts in bf16"), ("tied for tp", "olmo", "gemma")


def trained(config: Config) -> tuple[list[Whole], Whole]:
    """Gradients of each of 3 steps, and the weights after them."""
    start_process_group(CPU, timeout_seconds=60)
    mesh = mesh_of(config, {})
    spread, step = build(config, mesh)
    rank, ranks = data_coordinate(mesh)
    gradients = []
    for batch, lr in list(zip(batches(), LRS, strict=True))[:3]:
        mine = list(slices(batch, rank, ranks, 3))
        count = sum(int((micro.labels != -100).sum()) for micro in mine)
        step([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], count, lr)
        gradients.append(step.gradients)
    weights = gather(dict(spread.model.named_parameters()))
    dist.destroy_process_group()
    return gradients, weights


def bf16(layout: Layout, model: str) -> Config:
    """The same 4 micro-batches on any layout."""
    data_ranks = layout.ranks // (2 if "tp" in layout.overrides else 1)
    return config_of(Case(layout, 4 // data_ranks, Training(model, "sgd", "bf16")))


@pytest.fixture(scope="module")
def single() -> dict[str, tuple[list[Whole], Whole]]:
    return {model: run_ranks(1, trained, bf16(layout(1, "parallel=single"), model))[0] for model in (*WHOLE, *CUT)}


@pytest.mark.parametrize("model", WHOLE)
@pytest.mark.parametrize(
    "layout",
    [
        layout(1, "parallel=ddp"),
        layout(1, "parallel=fsdp2"),
        layout(2, "parallel=ddp"),
        layout(2, "parallel=zero1"),
        layout(2, "parallel=fsdp2"),
        layout(2, "parallel=ddp activations=full"),
        layout(2, "parallel=fsdp2 activations=full"),
        layout(2, "parallel=fsdp2 activations=segments"),
    ],
    ids=str,
)
def test_layouts_agree_in_bf16(layout: Layout, model: str, single: dict[str, tuple[list[Whole], Whole]]) -> None:
    """The bf16 products are the same, so only the order of the float32 sums over micro-batches and ranks differs; from
    the second step on, weights can be rounded to bf16 differently. The two uses of a tied weight are added in bf16 or,
    where FSDP2 reduces once a step, in float32."""
    gradients, weights = run_ranks(layout.ranks, trained, bf16(layout, model))[0]
    for name, expected in single[model][0][0].values.items():
        assert expected.dtype is gradients[0].values[name].dtype is torch.float32
        twice_used = model == "tied" and name == "embed.tokens.weight"
        assert (gradients[0].values[name] - expected).norm() <= (2**-8 if twice_used else 1e-6) * expected.norm(), name
    for name, expected in single[model][1].values.items():
        assert expected.dtype is weights.values[name].dtype is torch.float32
        torch.testing.assert_close(weights.values[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "model"),
    [*[(layout(2, "parallel=tp"), model) for model in CUT], (layout(4, "parallel=fsdp2 parallel.tp=2"), CUT[0])],
    ids=str,
)
def test_tensor_parallelism_agrees_within_the_rounding_of_bf16(
    layout: Layout, model: str, single: dict[str, tuple[list[Whole], Whole]]
) -> None:
    """It adds up parts of a product in bf16, so each sum is rounded once more."""
    gradients, weights = run_ranks(layout.ranks, trained, bf16(layout, model))[0]
    whole = torch.cat([value.flatten() for value in single[model][0][0].values.values()]).norm()
    for name, expected in single[model][0][0].values.items():
        assert expected.dtype is gradients[0].values[name].dtype is torch.float32
        assert (gradients[0].values[name] - expected).norm() <= 0.03 * max(expected.norm(), 0.01 * whole), name
    for name, expected in single[model][1].values.items():
        assert expected.dtype is weights.values[name].dtype is torch.float32
