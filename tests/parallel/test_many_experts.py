"""A model of DeepSeek-V3's shape is spread over 1,024 ranks of a pipeline, experts and shards as a run does it, and a
rank holds, in each of its places, what the formula says. As in test_many_ranks.py nothing is computed or sent."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import parallel.apply
from models.config import FeedForward, ModelConfig, MoE, Norm, Position
from models.shapes import in_experts
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Recompute, Scope, Strategy
from parallel.local import local
from parallel.mesh import build_mesh
from parallel.planning.memory import memory
from parallel.planning.traffic import Batch, traffic
from tests.parallel.test_many_ranks import share
from tests.ranks import run_ranks

PP, SHARD, EP = 8, 128, 64
EXPERT_SHARD = SHARD // EP
LAYERS = [8, 8, 8, 8, 8, 7, 7, 7]  # of each stage
VOCABULARY, CONTEXT = 129_280, 4096
DENSE, EXPERTS, DIM = 3, 256, 7168
EXPERT_ROWS, DENSE_ROWS = 2048, 18_432  # DeepSeek-AI 2024, DeepSeek-V3 Technical Report, 4.2; attention is not theirs
IN_EXPERTS = 653_908_770_816  # of 671 billion parameters: 58 layers of 256 experts of 3 x 2,048 x 7,168


def model() -> ModelConfig:
    moe = MoE(experts=EXPERTS, top_k=8, dim=EXPERT_ROWS, shared=1, dense_layers=DENSE)
    parts: dict[str, Any] = {"ffn": FeedForward.swiglu, "norm": Norm.rmsnorm, "position": Position.rotary}
    sizes: dict[str, Any] = {"layers": 61, "dim": DIM, "heads": 128, "ffn_dim": DENSE_ROWS, "context": CONTEXT}
    return ModelConfig(**sizes, **parts, vocab_size=VOCABULARY, bias=False, tied_head=False, moe=moe)


def layout() -> ParallelConfig:
    return ParallelConfig(Strategy.fsdp2, pp=PP, dp_shard=SHARD, ep=EP, stage_layers=LAYERS)


def bytes_here(rank: int) -> tuple[int, int]:
    """Of all parameters, and of experts."""
    for of_values in ("materialize", "check_replicas", "check_values"):
        setattr(parallel.apply, of_values, lambda *args: None)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PP * SHARD)
    config, device = layout(), torch.device("cpu")
    mesh = build_mesh(config, device)
    kept, compiled = ActivationsConfig(Recompute.full), CompileConfig(scope=Scope.none)
    spread = parallel.apply.parallelize(model(), mesh, config, Dtype.bf16, Dtype.fp32, compiled, kept, 0, device)
    held = {name: local(parameter).nbytes for name, parameter in spread.model.named_parameters()}
    return sum(held.values()), sum(size for name, size in held.items() if in_experts(name))


def formula(rank: int) -> tuple[int, int]:
    """Rows of each parameter are shared out over dp_shard; an expert is on one of the ranks along ep, those of a rank
    are shared out over expert_shard; routers are whole. 4 bytes each."""
    stage, shard = divmod(rank, SHARD)

    def rows(number: int) -> int:
        return share(number, SHARD, shard)

    first = sum(LAYERS[:stage])
    layers = range(first, first + LAYERS[stage])
    routed = sum(layer >= DENSE for layer in layers)
    experts = routed * share(EXPERTS // EP, EXPERT_SHARD, shard // EP) * 3 * EXPERT_ROWS * DIM
    attention = 2 * rows(DIM) + rows(3 * DIM) * DIM + rows(DIM) * DIM
    dense = 2 * rows(DENSE_ROWS) * DIM + rows(DIM) * DENSE_ROWS
    shared = 2 * rows(EXPERT_ROWS) * DIM + rows(DIM) * EXPERT_ROWS
    beside = EXPERTS * DIM + 2 * EXPERTS + 1 + shared  # the router
    held = len(layers) * attention + (len(layers) - routed) * dense + routed * beside + experts
    held += rows(VOCABULARY) * DIM if stage == 0 else 0
    held += rows(DIM) + rows(VOCABULARY) * DIM if stage == PP - 1 else 0
    return 4 * held, 4 * experts


@pytest.mark.torch211
@pytest.mark.parametrize("rank", [0, 63, 64, 5 * SHARD + 70, 1023])
def test_a_rank_of_1024_holds_what_the_formula_says(rank: int) -> None:
    assert run_ranks(1, bytes_here, rank) == [formula(rank)]


def test_the_plan_of_each_stage_is_that_of_its_first_rank() -> None:
    batch, kept = Batch(1, 64, CONTEXT), ActivationsConfig(Recompute.full)
    for stage in range(PP):
        planned = memory(model(), layout(), Dtype.bf16, Dtype.fp32, batch, kept, 2, stage)
        assert planned.parameters == formula(stage * SHARD)[0]


def test_the_plan_of_a_stage_sends_what_its_experts_do() -> None:
    """Of the second stage, whose 8 layers all have experts, in 64 micro-batches that are computed again. Parameters are
    gathered at the start, and once for each forward pass, which leaves them resharded to whatever comes next.

    A row for each token and expert goes there and back, three times: in forward, again, and in backward."""
    batch, kept = Batch(1, 64, CONTEXT), ActivationsConfig(Recompute.full)
    found = traffic(model(), layout(), Dtype.bf16, Dtype.fp32, batch, kept, pipeline_rank=1)
    sent: Counter[tuple[str, str]] = Counter()
    for entry in found:
        sent[entry.axis, entry.collective.name] += entry.buffer_bytes
    experts = 8 * (EXPERTS // EP) * 3 * EXPERT_ROWS * DIM
    assert sent["expert_shard", "all_gather"] == (1 + 64) * 2 * experts
    assert sent["expert_shard", "reduce_scatter"] == 4 * experts
    assert sent["ep", "all_to_all"] == 64 * 8 * (3 * 2 * CONTEXT * 8 * DIM * 2 + 2 * 8 * EXPERTS)


def test_the_formula_counts_every_expert_once() -> None:
    assert sum(formula(rank)[1] for rank in range(PP * SHARD)) == 4 * IN_EXPERTS
