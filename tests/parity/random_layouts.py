"""Random legal layouts of 1 to 8 ranks for random models of odd sizes, and random ways of making one illegal."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from models.config import Balance, Score
from parallel.config import (
    Context,
    Dtype,
    ParallelConfig,
    Recompute,
    Reduce,
    Schedule,
    Scope,
    Strategy,
)
from parallel.pipeline import sends_to_itself
from parallel.planning.stages import ONE_STAGE, SPLIT, V_SHAPED, runs, stages_per_rank
from training.check import accumulation, check
from training.check_layout import DDP_KEYS
from training.config import Config, OptimizerKind, leaves
from training.refusal import Refusal
from training.resolve import Chosen, World, data_ranks, resolve

RANKS = [1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8]  # more often those that several axes can share


@dataclass
class Drawn:
    """vocabulary: of the model; smaller than any tokenizer's, so it is not in the config that is checked."""

    number: int
    ranks: int
    config: Config
    vocabulary: int

    @property
    def world(self) -> World:
        return World(self.ranks, self.ranks)

    def __str__(self) -> str:
        default, sections = leaves(Config()), ("model", "parallel", "activations", "optimizer")
        told = (*sections, "sequence_length", "batch_sequences", "micro_batch")
        chosen = {name: value for name, value in leaves(self.config).items() if value != default[name]}
        values = [f"{name}={value}" for name, value in chosen.items() if name.startswith(told)]
        return f"layout {self.number} on {self.ranks} ranks: {' '.join(values)} vocabulary={self.vocabulary}"


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def draw(random: Random, number: int) -> Drawn:
    """A layout and a model that it can spread."""
    ranks = random.choice(RANKS)
    pp, cp, tp, there = draw_degrees(random, ranks)
    config = Config(steps=2, seed=random.randrange(1000))
    config.hardware.device = "cpu"
    config.precision.dtype, config.compile.scope = Dtype.fp64, Scope.none
    config.optimizer.kind, config.optimizer.clip = random.choice(list(OptimizerKind)), random.choice([0.5, None])
    config.parallel.tp, config.parallel.cp = tp, cp
    draw_context(random, config.parallel)
    draw_model(random, config)
    times = draw_pipeline(random, config, pp)
    draw_parallel(random, config.parallel, there, times)
    draw_experts(random, config)
    if pp == 1 or config.parallel.schedule not in SPLIT:
        draw_activations(random, config)
    config.micro_batch = random.randint(1, 3)
    config.batch_sequences = there * times * config.micro_batch
    config.model.value_embeddings = random.randint(0, config.model.layers // 2)
    rows = config.model.vocab_multiple
    vocabulary = random.choice([size for size in range(11, 90) if enough(-(-size // rows) * rows, tp)])
    return Drawn(number, ranks, config, vocabulary)


def draw_degrees(random: Random, ranks: int) -> list[int]:
    """Of pp, cp, tp and data parallelism, which is two axes."""
    degrees = [1, 1, 1, 1]
    while ranks > 1:
        prime = divisors(ranks)[1]
        degrees[random.choice([0, 1, 2, 3, 3])] *= prime
        ranks //= prime
    return degrees


def draw_context(random: Random, parallel: ParallelConfig) -> None:
    if parallel.cp > 1:
        parallel.context = random.choice(list(Context))


def draw_model(random: Random, config: Config) -> None:
    """Heads and sequences are shared out evenly; nothing else needs to divide."""
    model, tp, cuts = config.model, config.parallel.tp, config.parallel.sequence_cuts
    model.layers = random.randint(1, 3)
    of_heads = tp * config.parallel.cp if config.parallel.context is Context.ulysses else tp
    model.kv_heads = of_heads * random.randint(1, 2)
    model.heads = model.kv_heads * random.randint(1, 3)
    model.dim = model.heads * random.choice([3, 4, 5, 7])
    model.ffn_dim = random.choice([size for size in range(5, 50) if enough(size, tp)])
    config.sequence_length = cuts * random.randint(1, max(1, 12 // cuts))
    model.context = config.sequence_length + cuts * random.randint(0, 2)
    model.vocab_multiple = random.choice([1, 3, 128])
    model.bias, model.tied_head, model.fused_qkv = (random.random() < 0.5 for _ in range(3))
    model.x0, model.skips = (random.random() < 0.3 for _ in range(2))
    model.logit_softcap, model.z_loss = random.choice([None, 5.0]), random.choice([0.0, 0.01])


def draw_pipeline(random: Random, config: Config, pp: int) -> int:
    """Schedule and stages, and layers for them. Returns a number of micro-batches that it can take."""
    parallel = config.parallel
    parallel.pp = pp
    if pp == 1:
        return random.randint(1, 3)
    schedules = [replace(parallel, schedule=schedule) for schedule in Schedule]
    runnable = [one.schedule for one in schedules if not sends_to_itself(one, "cpu")]
    parallel.schedule = random.choice(runnable)
    if parallel.schedule not in (*ONE_STAGE, *V_SHAPED):
        parallel.stages_per_rank = random.choice([None, 2, 3])
    number = pp * stages_per_rank(parallel)
    config.model.layers = number + random.randint(0, 2)
    if random.random() < 0.3:
        parallel.stage_layers = [1] * (number - 1) + [config.model.layers - number + 1]
    return random.choice([times for times in range(1, 2 * pp + 3) if runs(parallel, times)])


def enough(size: int, tp: int) -> bool:
    """Whether each rank has some of what is cut."""
    return len(torch.arange(size).chunk(tp)) == tp


def draw_parallel(random: Random, parallel: ParallelConfig, there: int, times: int) -> None:
    """there: ranks for data parallelism; times: micro-batches in a step."""
    alone = [Strategy.single] if there == 1 else []
    parallel.strategy = random.choice([Strategy.ddp, Strategy.fsdp2, Strategy.fsdp2, *alone])
    if parallel.strategy is Strategy.ddp:
        parallel.dp_replicate = there
        parallel.reduce = random.choice([Reduce.auto, Reduce.step])
    if parallel.torch_ddp:
        parallel.bucket_cap_mb = random.choice([25.0, 0.01])
        parallel.gradient_as_bucket_view = random.random() < 0.5
        parallel.static_graph = times == 1 and random.random() < 0.5
    if parallel.strategy is Strategy.fsdp2:
        parallel.dp_shard = random.choice(divisors(there))
        parallel.dp_replicate = there // parallel.dp_shard
        parallel.reduce = random.choice(list(Reduce))
        parallel.reshard_after_forward = random.choice([True, False, random.choice(divisors(parallel.shards))])
        parallel.reshard_after_backward = random.random() < 0.5
        parallel.prefetch_forward, parallel.prefetch_backward = random.randint(0, 2), random.randint(0, 2)
        parallel.cpu_offload = parallel.pp == 1 and random.random() < 0.3
        if parallel.pp > 1:
            parallel.reduce = Reduce.auto
            parallel.reshard_after_forward = parallel.schedule not in SPLIT and random.random() < 0.5


def draw_experts(random: Random, config: Config) -> None:
    """For some models, on ranks of every axis that shares a copy."""
    if random.random() < 0.5:
        return
    moe = config.model.moe
    moe.experts, moe.dim, moe.shared = random.choice([2, 3, 4, 6, 8]), random.randint(5, 30), random.randint(0, 2)
    while moe.shared and not enough(moe.shared * moe.dim, config.parallel.tp):
        moe.dim += 1
    moe.top_k = random.randint(1, min(3, moe.experts))
    moe.normalize = moe.top_k > 1 and random.random() < 0.5
    moe.dense_layers = random.randint(0, config.model.layers - 1)
    moe.score, moe.balance = random.choice(list(Score)), random.choice(list(Balance))
    moe.bias_rate, moe.z_loss = (random.choice([0.0, 0.02]) for _ in range(2))
    moe.scale = random.choice([1.0, 2.5])
    draw_expert_ranks(random, config)


def draw_expert_ranks(random: Random, config: Config) -> None:
    parallel, default = config.parallel, ParallelConfig()
    ranks = parallel.dp_shard * parallel.cp * parallel.tp
    parallel.ep = random.choice([1, *2 * divisors(math.gcd(config.model.moe.experts, ranks))[1:]])
    if not parallel.torch_ddp:
        for name in DDP_KEYS:
            setattr(parallel, name, getattr(default, name))


def draw_activations(random: Random, config: Config) -> None:
    """Every mode but torch's budget, which needs a compiled graph."""
    activations, layers = config.activations, config.model.layers
    activations.mode = random.choice([mode for mode in Recompute if mode is not Recompute.budget])
    if activations.mode is Recompute.segments:
        activations.segments = random.choice([None, random.randint(1, layers)])
    if activations.mode is Recompute.every_n:
        activations.every_n = random.randint(1, layers)


def check_legal(drawn: Drawn) -> None:
    """As train.py does; fills in what follows from other values."""
    resolve(drawn.config, drawn.world, Chosen({"model": "drawn"}))
    found = check(drawn.config, drawn.world)
    assert not found, f"{drawn}: {Refusal(found)}"


def legal(random: Random, number: int) -> Drawn:
    drawn = draw(random, number)
    check_legal(drawn)
    return drawn


# Each makes a legal layout illegal and returns the key that must be named; None where it does not apply.


def width(random: Random, drawn: Drawn) -> str | None:
    drawn.config.model.dim += 1
    return "model.heads" if drawn.config.model.heads > 1 else None


def groups(random: Random, drawn: Drawn) -> str | None:
    drawn.config.model.kv_heads = drawn.config.model.heads + random.randint(1, 3)
    return "model.kv_heads"


def shared_heads(random: Random, drawn: Drawn) -> str | None:
    model, tp = drawn.config.model, drawn.config.parallel.tp
    model.heads = model.kv_heads = tp * random.randint(1, 3) + random.randint(1, max(tp - 1, 1))
    model.dim = 4 * model.heads
    return "parallel.tp" if tp > 1 else None


def length(random: Random, drawn: Drawn) -> str | None:
    cuts = drawn.config.parallel.sequence_cuts
    drawn.config.model.context += cuts
    assert drawn.config.sequence_length is not None
    drawn.config.sequence_length += random.randint(1, max(cuts - 1, 1))
    return "sequence_length" if cuts > 1 else None


def context(random: Random, drawn: Drawn) -> str | None:
    cuts = drawn.config.parallel.sequence_cuts
    drawn.config.model.context += random.randint(1, max(cuts - 1, 1))
    return "model.context" if cuts > 1 else None


def too_long(random: Random, drawn: Drawn) -> str | None:
    drawn.config.sequence_length = drawn.config.model.context + drawn.config.parallel.sequence_cuts
    return "sequence_length"


def feedforward(random: Random, drawn: Drawn) -> str | None:
    tp = drawn.config.parallel.tp
    drawn.config.model.ffn_dim = random.choice([size for size in range(1, 50) if not enough(size, tp)] or [0])
    return "model.ffn_dim"


def shared_experts(random: Random, drawn: Drawn) -> str | None:
    model, tp = drawn.config.model, drawn.config.parallel.tp
    found = [size for size in range(1, 50) if not enough(model.moe.shared * size, tp)]
    if model.moe.experts == 0 or model.moe.shared == 0 or not found:
        return None
    model.moe.dim = random.choice(found)
    return "model.moe.dim"


def batch(random: Random, drawn: Drawn) -> str | None:
    config = drawn.config
    ranks = data_ranks(config)
    config.batch_sequences = random.randint(1, max(ranks - 1, 1))
    return "batch_sequences" if ranks > 1 else None


def micro_batch(random: Random, drawn: Drawn) -> str | None:
    assert drawn.config.batch_sequences is not None
    drawn.config.micro_batch = drawn.config.batch_sequences + 1
    return "micro_batch"


def more_ranks(random: Random, drawn: Drawn) -> str | None:
    drawn.ranks += random.randint(1, 3)
    return "parallel"


def another_axis(random: Random, drawn: Drawn) -> str | None:
    drawn.config.parallel.ep = drawn.config.model.moe.experts + 2
    return "parallel.ep"


def heads_of_sequences(random: Random, drawn: Drawn) -> str | None:
    """As many for each tensor rank as before, and one more."""
    model, parallel = drawn.config.model, drawn.config.parallel
    if parallel.cp == 1:
        parallel.context = random.choice([Context.ring, Context.ulysses])
        return "parallel.context"
    parallel.context = Context.ulysses
    model.heads = model.kv_heads = parallel.tp * (parallel.cp + 1)
    model.dim = 4 * model.heads
    return "parallel.context"


def dropout_in_a_ring(random: Random, drawn: Drawn) -> str | None:
    drawn.config.parallel.context, drawn.config.model.dropout = Context.ring, 0.1
    return "parallel.context"


def too_few_layers(random: Random, drawn: Drawn) -> str | None:
    parallel = drawn.config.parallel
    drawn.config.model.layers = parallel.pp * stages_per_rank(parallel) - 1
    return "parallel.pp" if parallel.pp > 1 else None


def too_few_micro_batches(random: Random, drawn: Drawn) -> str | None:
    assert isinstance(drawn.config.micro_batch, int)
    drawn.config.batch_sequences = data_ranks(drawn.config) * drawn.config.micro_batch
    return None if drawn.config.parallel.pp == 1 or runs(drawn.config.parallel, 1) else "micro_batch"


def reshard(random: Random, drawn: Drawn) -> str | None:
    parallel = drawn.config.parallel
    parallel.reshard_after_forward = parallel.shards + random.randint(1, 3)
    return "parallel.reshard_after_forward"  # also where there are no shards


def shards_of_copies(random: Random, drawn: Drawn) -> str | None:
    drawn.config.parallel.dp_shard = 2
    return "parallel.dp_shard" if drawn.config.parallel.strategy is not Strategy.fsdp2 else None


def reduced_twice(random: Random, drawn: Drawn) -> str | None:
    drawn.config.parallel.reduce = Reduce.micro_batch
    return "parallel.reduce" if drawn.config.parallel.strategy is Strategy.ddp else None


def static_graph(random: Random, drawn: Drawn) -> str | None:
    drawn.config.parallel.static_graph = True
    several = drawn.config.parallel.torch_ddp and accumulation(drawn.config, drawn.world) > 1
    return "parallel.static_graph" if several or drawn.config.parallel.strategy is Strategy.fsdp2 else None


def key_of_another_strategy(random: Random, drawn: Drawn) -> str | None:
    parallel = drawn.config.parallel
    keys: list[tuple[str, Any]] = [("prefetch_forward", 5), ("cpu_offload", True), ("reshard_after_backward", False)]
    if parallel.strategy is Strategy.fsdp2:
        keys = [("bucket_cap_mb", 1.0), ("gradient_as_bucket_view", False)]
    name, value = random.choice(keys)
    setattr(parallel, name, value)
    return f"parallel.{name}"


def segments(random: Random, drawn: Drawn) -> str | None:
    drawn.config.activations.mode = Recompute.segments
    drawn.config.activations.segments = drawn.config.model.layers + random.randint(1, 3)
    return "activations.segments"


def budget(random: Random, drawn: Drawn) -> str | None:
    drawn.config.activations.mode = Recompute.budget
    return "activations.mode"


def key_of_another_mode(random: Random, drawn: Drawn) -> str | None:
    activations = drawn.config.activations
    activations.mode, activations.every_n = random.choice([Recompute.none, Recompute.full, Recompute.offload]), 7
    return "activations.every_n"


BREAKS: list[Callable[[Random, Drawn], str | None]] = [
    width,
    groups,
    shared_heads,
    length,
    context,
    too_long,
    feedforward,
    shared_experts,
    batch,
    micro_batch,
    more_ranks,
    another_axis,
    heads_of_sequences,
    dropout_in_a_ring,
    too_few_layers,
    too_few_micro_batches,
    reshard,
    shards_of_copies,
    reduced_twice,
    static_graph,
    key_of_another_strategy,
    segments,
    budget,
    key_of_another_mode,
]


def illegal(random: Random, number: int) -> tuple[Drawn, str]:
    """A layout and the key, or the beginning of it, that must be named."""
    while True:
        drawn = legal(random, number)
        key = random.choice(BREAKS)(random, drawn)
        if key is not None:
            return drawn, key
