"""Models of 7 and 70 billion parameters are split and sharded for 512 ranks, of which one is here: it holds what the
formula says. Nothing is computed and nothing sent: the model stays on the meta device, the process group is torch's
fake one (private; seen to work on torch 2.11 and 2.15)."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.config import ParallelConfig, Strategy
from parallel.data import Sharded
from parallel.local import local
from parallel.mesh import build_mesh
from parallel.tensor import cut_tensors
from tests.ranks import run_ranks

RANKS, TP = 512, 8
SHAPES: dict[str, dict[str, Any]] = {
    "7B": {"layers": 32, "dim": 4096, "heads": 32, "ffn_dim": 11008},
    "70B": {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "ffn_dim": 28672},
}
VOCABULARY, CONTEXT = 32_000, 4096


@dataclass(frozen=True)
class Degrees:
    replicate: int
    shard: int


def model_of(name: str) -> ModelConfig:
    return ModelConfig(**SHAPES[name], vocab_size=VOCABULARY, context=CONTEXT, bias=False, tied_head=False)


def bytes_here(name: str, degrees: Degrees, rank: int) -> int:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    config = ParallelConfig(Strategy.fsdp2, dp_replicate=degrees.replicate, dp_shard=degrees.shard, tp=TP)
    mesh = build_mesh(config, torch.device("cpu"))
    with torch.device("meta"):
        model = Decoder(model_of(name))
    cut_tensors(model, mesh["tp"])
    Sharded(model, mesh, config, torch.bfloat16, torch.float32)
    return sum(local(parameter).numel() * parameter.element_size() for parameter in model.parameters())


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
    assert run_ranks(1, bytes_here, name, degrees, rank) == [formula(name, degrees, rank)]


@pytest.mark.parametrize("name", SHAPES)
def test_the_formula_counts_the_model_once(name: str) -> None:
    """Over all ranks; what tp does not cut is there 8 times."""
    model = model_of(name)
    copied = (CONTEXT + 2 * model.layers + 1) * model.dim  # positions and norms
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in Decoder(model).parameters())
    held = sum(formula(name, Degrees(1, 64), rank) for rank in range(RANKS))
    assert held == 4 * (whole + 7 * copied)
