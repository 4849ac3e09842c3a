"""A parameter that holds nothing, or something else than was declared, is named on every layout."""

import math
from typing import Any

import pytest
import torch

from models.config import MoE, Norm, Residual
from models.roles import parameter_specs
from parallel.apply import parallelize
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Strategy
from parallel.local import local
from parallel.mesh import build_mesh
from parallel.values import WrongValues, check_values
from tests.models.build import tiny
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYOUTS = {
    "single": ParallelConfig(Strategy.single),
    "fsdp2 x tp": ParallelConfig(Strategy.fsdp2, dp_shard=2, tp=2),
    "pp x ddp": ParallelConfig(Strategy.ddp, pp=2, dp_replicate=2),
}


def spread(parallel: ParallelConfig, seed: int = 0, **model: Any) -> Any:
    mesh = None if parallel.strategy is Strategy.single else build_mesh(parallel, CPU)
    config = tiny(**({"heads": 4, "dim": 32} | model))
    options = CompileConfig(), ActivationsConfig()
    return parallelize(config, mesh, parallel, Dtype.fp32, Dtype.fp32, *options, seed=seed, device=CPU)


def told(parallel: ParallelConfig) -> list[str]:
    """What is said of each way to go wrong."""
    found = []
    for name, loaded_from, change in [
        ("blocks.0.feedforward.up.weight", None, lambda values: values.zero_()),
        ("blocks.0.feedforward.up.weight", None, lambda values: values.mul_(1.5)),
        ("blocks.0.feedforward.up.weight", None, lambda values: values.add_(0.1)),
        ("blocks.0.feedforward.up.bias", None, lambda values: values.fill_(1e-3)),
        ("blocks.0.attention_norm.weight", "a/b", lambda values: values.zero_()),
        ("blocks.1.attention.qkv.weight", "a/b", lambda values: values.view(-1)[:1].fill_(math.nan)),
    ]:
        now = spread(parallel)
        check_values(now.model, now.mesh, loaded_from)
        if name in dict(now.model.named_parameters()):
            with torch.no_grad():
                change(local(now.model.get_parameter(name)))
        try:
            check_values(now.model, now.mesh, loaded_from)
            found.append("")
        except WrongValues as error:
            found.append(str(error))
    return found


EXPECTED = [
    "feedforward.up.weight is 0 everywhere",
    "feedforward.up.weight has a standard deviation of 0.0",
    "feedforward.up.weight has a mean of 0.",
    "feedforward.up.bias has a mean of 0.001, declared is 0",
    "attention_norm.weight is 0 everywhere",
    "attention.qkv.weight has values that are not finite",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_way_to_go_wrong_is_named(layout: str) -> None:
    parallel = LAYOUTS[layout]
    ranks = 1 if parallel.strategy is Strategy.single else 4
    of_ranks = run_ranks(ranks, told, parallel, group=ranks > 1)
    for expected, *said in zip(EXPECTED, *of_ranks, strict=True):
        assert all(said), expected  # each rank stops
        assert any(expected in of_rank for of_rank in said), said
        other_stage = [of_rank for of_rank in said if expected not in of_rank]
        assert all("another stage" in of_rank for of_rank in other_stage)


@pytest.mark.parametrize(
    "model",
    [
        {"init_residual": Residual.zero, "norm": Norm.rmsnorm, "bias": False, "tied_head": False},
        {"moe": MoE(experts=4), "value_embeddings": 1, "x0": True, "skips": True},
        {"vocab_size": 3, "vocab_multiple": 512, "init_embedding_std": 1.0, "init_std": 1e-3},
    ],
)
def test_what_is_drawn_as_declared_passes(model: dict[str, Any]) -> None:
    for seed in range(3):
        spread(LAYOUTS["single"], seed, **model)


def check_a_rare_draw(parallel: ParallelConfig) -> None:
    now = spread(parallel)
    weight = now.model.get_parameter("blocks.0.feedforward.up.weight")
    values, declared = local(weight), parameter_specs(now.model)["blocks.0.feedforward.up.weight"].std
    with torch.no_grad():
        values.sub_(values.mean()).div_(values.std(correction=0))
        values.mul_(declared * (1 + 4.5 / math.sqrt(2 * values.numel())))
    check_values(now.model, now.mesh)


def test_copies_make_no_draw_less_likely() -> None:
    """Of four copies of a weight whose deviation is 4.5 standard errors off."""
    run_ranks(4, check_a_rare_draw, ParallelConfig(Strategy.ddp, dp_replicate=4), group=True)
