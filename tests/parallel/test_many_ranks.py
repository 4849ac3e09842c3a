"""Models of 7 and 70 billion parameters are spread over 512 ranks as a run does it, and one rank holds what the formula
says. Nothing is computed and nothing sent: the process group is torch's fake one (private; seen to work on torch 2.11
and 2.15), whose gathers give each rank's place this rank's values."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import parallel.apply
from models.config import ModelConfig
from models.flops import parameters
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Scope, Strategy
from parallel.local import local
from parallel.mesh import build_mesh
from tests.ranks import run_ranks

RANKS, TP = 512, 8
# Llama 2's (Touvron et al. 2023), whose three matrices of 11,008 and 28,672 rows are here two of half as many again.
SHAPES: dict[str, dict[str, Any]] = {
    "7B": {"layers": 32, "dim": 4096, "heads": 32, "ffn_dim": 16512},
    "70B": {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "ffn_dim": 43008},
}
PUBLISHED = {"7B": 6_738_415_616, "70B": 68_976_648_192}  # without our table of positions
VOCABULARY, CONTEXT = 32_000, 4096


@dataclass(frozen=True)
class Degrees:
    replicate: int
    shard: int


def model_of(name: str) -> ModelConfig:
    return ModelConfig(**SHAPES[name], vocab_size=VOCABULARY, context=CONTEXT, bias=False, tied_head=False)


def bytes_here(name: str, degrees: Degrees, rank: int, drawn: bool) -> int:
    """drawn: with first values, compared over ranks. They take a minute for each billion; without them the model stays
    on the meta device. A fake group adds nothing up, so what all ranks hold together is not looked at."""
    for of_values in ("check_values", *(() if drawn else ("materialize", "check_replicas"))):
        setattr(parallel.apply, of_values, lambda *args, **options: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    config = ParallelConfig(Strategy.fsdp2, dp_replicate=degrees.replicate, dp_shard=degrees.shard, tp=TP)
    device = torch.device("cpu")
    mesh = build_mesh(config, device)
    kept, compiled = ActivationsConfig(), CompileConfig(scope=Scope.none)
    spread = parallel.apply.parallelize(model_of(name), mesh, config, Dtype.bf16, Dtype.fp32, compiled, kept, 0, device)
    return sum(local(parameter).nbytes for parameter in spread.model.parameters())


def share(size: int, parts: int, part: int) -> int:
    """Each part has as much as the first, up to what is left."""
    each = -(-size // parts)
    return max(min(each, size - part * each), 0)


def formula(name: str, degrees: Degrees, rank: int) -> int:
    """Rows of embedding and head, of q, k, v and up are cut by tp, columns of out and down; norms and positions are
    not. Rows of what is left are shared out over dp_shard. 4 bytes each."""
    model, (shard, tp) = model_of(name), (rank // TP % degrees.shard, rank % TP)
    head_dim = model.dim // model.heads

    def rows(number: int) -> int:
        return share(number, degrees.shard, shard)

    def cut(number: int) -> int:
        return share(number, TP, tp)

    block = (
        2 * rows(model.dim)
        + rows(cut((model.heads + 2 * model.key_value_heads) * head_dim)) * model.dim
        + rows(model.dim) * cut(model.dim)
        + rows(cut(model.feedforward_dim)) * model.dim
        + rows(model.dim) * cut(model.feedforward_dim)
    )
    outside = (2 * rows(cut(VOCABULARY)) + rows(CONTEXT)) * model.dim + rows(model.dim)
    return 4 * (model.layers * block + outside)


@pytest.mark.parametrize("rank", [0, 511])
@pytest.mark.parametrize("degrees", [Degrees(1, 64), Degrees(8, 8)], ids=["fsdp2", "hsdp"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_of_512_holds_what_the_formula_says(name: str, degrees: Degrees, rank: int) -> None:
    assert run_ranks(1, bytes_here, name, degrees, rank, False) == [formula(name, degrees, rank)]


@pytest.mark.slow
def test_a_rank_of_512_draws_what_it_holds() -> None:
    [found] = run_ranks(1, bytes_here, "7B", Degrees(1, 64), 511, True)
    assert found == formula("7B", Degrees(1, 64), 511)


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_counts_the_model_once(name: str) -> None:
    """Over all ranks; what tp does not cut is there 8 times."""
    model = model_of(name)
    copied = (CONTEXT + 2 * model.layers + 1) * model.dim  # positions and norms
    whole = parameters(model)
    assert whole == PUBLISHED[name] + CONTEXT * model.dim
    held = sum(formula(name, Degrees(1, 64), rank) for rank in range(RANKS))
    assert held == 4 * (whole + 7 * copied)
