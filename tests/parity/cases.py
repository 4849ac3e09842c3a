"""What is run on each layout, and the same for the oracle."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from models.config import ModelConfig, Position
from tests.oracle import Batch, Recipe
from tests.oracle_model import Experts, Rotary, Shape
from tests.parity.families import DEEPSEEK, FAMILIES
from tests.parity.layouts import Layout
from training.check import check
from training.compose import compose
from training.config import Config
from training.refusal import Refusal
from training.resolve import Chosen, World, data_ranks, resolve

SEED = 5
SEQUENCES, LENGTH = 12, 16  # of a step; 12 is what 4 ranks x 3 micro-batches need
LRS = (0.004, 0.01, 0.008, 0.002, 0.006)
VOCABULARY = 67

# No size divides by 2 or 4: every shard is uneven. The second model has a head of its own and a padded vocabulary.
SIZES = "model.layers=3 model.dim=30 model.heads=3 model.ffn_dim=34 model.context=17"
# Heads are shared out whole; what else tensor parallelism cuts does not divide by 4, the vocabulary not by 2 either.
TP_SIZES = "model.dim=40 model.heads=8 model.ffn_dim=34 model.context=24"
STREAMS = "model.x0=true model.skips=true"
EXPERTS = "model.moe.experts=5 model.moe.top_k=2 model.moe.dim=22 model.moe.bias_rate=0.02"
MODELS = {
    "tied": f"{SIZES} model.tied_head=true model.vocab_multiple=1",
    "untied": f"{SIZES} model.tied_head=false model.vocab_multiple=128",
    "tied for tp": f"{TP_SIZES} model.layers=3 model.tied_head=true model.vocab_multiple=1",
    "untied for tp": f"{TP_SIZES} model.layers=3 model.tied_head=false model.vocab_multiple=128",
    "grouped heads": f"{TP_SIZES} model.layers=3 model.kv_heads=4 model.bias=false model.logit_softcap=3.0 "
    "model.z_loss=0.01",
    "three matrices": f"{TP_SIZES} model.layers=3 model.kv_heads=4 model.fused_qkv=false model.tied_head=false",
    "tied for pp": f"{TP_SIZES} model.layers=9 model.tied_head=true model.vocab_multiple=1",
    "streams": f"{SIZES} model.tied_head=false model.vocab_multiple=1 {STREAMS} model.value_embeddings=1",
    "streams for tp": f"{TP_SIZES} model.layers=5 model.tied_head=true model.kv_heads=4 model.vocab_multiple=128 "
    f"model.bias=false {STREAMS} model.value_embeddings=2",
    "streams for pp": f"{TP_SIZES} model.layers=9 model.tied_head=true model.vocab_multiple=1 {STREAMS} "
    "model.value_embeddings=3",
    "experts": f"{SIZES} model.tied_head=true model.vocab_multiple=1 {EXPERTS} model.moe.shared=1 "
    "model.moe.dense_layers=1 model.moe.score=sigmoid model.moe.scale=2.5 model.moe.balance=sequence "
    "model.moe.balance_weight=0.03 model.moe.z_loss=0.02",
    "experts by the step before": f"{SIZES} model.tied_head=false model.vocab_multiple=128 model.bias=false {EXPERTS} "
    "model.moe.balance=step model.moe.balance_weight=0.05 model.moe.normalize=false",
    "experts for ep": f"{TP_SIZES} model.layers=3 model.tied_head=true model.vocab_multiple=1 {EXPERTS} "
    "model.moe.experts=8 model.moe.dense_layers=1 model.moe.balance=sequence model.moe.balance_weight=0.03 "
    "model.moe.shared=1 model.moe.z_loss=0.02 model.moe.score=sigmoid",
    "experts for ep by the step before": f"{TP_SIZES} model.layers=2 model.tied_head=false {EXPERTS} "
    "model.moe.experts=8 model.moe.balance=step model.moe.balance_weight=0.05 model.bias=false",
    "experts for pp": f"{TP_SIZES} model.layers=5 model.tied_head=true model.vocab_multiple=1 {EXPERTS} "
    "model.moe.experts=8 model.moe.dense_layers=1 model.moe.balance=step model.moe.shared=2 model.moe.z_loss=0.02",
    "experts in turn": f"{TP_SIZES} model.layers=2 model.tied_head=false {EXPERTS} model.moe.experts=6 "
    "model.moe.forced_balance=true model.bias=false",
    # Rows that grouped_mm takes; biased so far that a rounded weight changes no choice.
    "experts in bf16": f"{TP_SIZES} model.layers=3 model.tied_head=false model.moe.experts=5 model.moe.dim=24 "
    "model.moe.balance=sequence model.moe.bias_rate=0.5",
    "untied for pp": f"{TP_SIZES} model.layers=9 model.tied_head=false model.vocab_multiple=128",
    **FAMILIES,
    **{f"deepseek {name}": model for name, model in DEEPSEEK.items()},
}
MUP = "model.parametrization=mup model.mup_base_dim=16 model.mup_base_head_dim=2"
MODELS |= {
    "mup": f"{MODELS['grouped heads']} {MUP}",
    "mup with experts": f"{MODELS['experts for ep']} {MUP}",
    "mup for pp": f"{MODELS['untied for pp']} {MUP}",
}
OPTIMIZERS = {
    "sgd": "optimizer=sgd optimizer.beta1=0.9 optimizer.weight_decay=0.1",
    "adamw": "optimizer=adamw optimizer.weight_decay=0.1",
}
CLIP = 0.5  # below the norms of some steps and above those of others
RUN = f"seed={SEED} steps={len(LRS)} sequence_length={LENGTH} hardware.device=cpu optimizer.clip={CLIP}"

# A router's choice must not hang on rounding: a model whose trajectory has a closer one needs other numbers.
LEAST_MARGIN = 1e-8


@dataclass(frozen=True)
class Training:
    """What the oracle does once for all layouts."""

    model: str
    optimizer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.precision} {self.optimizer} {self.model}"


@dataclass(frozen=True)
class Case:
    layout: Layout
    accumulation: int
    training: Training

    def __str__(self) -> str:
        return f"{self.layout}, accumulation {self.accumulation}, {self.training}"


@cache
def _composed(overrides: str) -> tuple[Config, Chosen]:
    return compose(overrides.split())


def config_of(case: Case) -> Config:
    """The resolved config of a case, from the presets and keys that one would give to train.py. The keys of the layout
    are composed apart from those of the training, since composing costs more than most cases."""
    training, layout = case.training, case.layout
    overrides = f"{RUN} {MODELS[training.model]} {OPTIMIZERS[training.optimizer]} precision={training.precision}"
    config, chosen = copy.deepcopy(_composed(overrides))
    asked = copy.deepcopy(_composed(layout.overrides)[0])
    config.parallel, config.compile, config.activations = asked.parallel, asked.compile, asked.activations
    config.batch_sequences = SEQUENCES
    world = World(layout.ranks, layout.ranks_per_host)
    resolve(config, world, chosen)
    config.micro_batch = SEQUENCES // data_ranks(config) // case.accumulation
    problems = check(config, world)
    assert not problems, f"{case}: {Refusal(problems)}"
    config.model.vocab_size = VOCABULARY  # a prime, which no tokenizer has
    return config


def shape_of(model: ModelConfig) -> Shape:
    assert model.vocab_size is not None
    sizes = (model.layers, model.dim, model.heads, model.feedforward_dim, model.context, model.vocab_size)
    return Shape(
        *sizes,
        tied=model.tied_head,
        kv_heads=model.kv_heads,
        bias=model.bias,
        head_dim=model.head_dim,
        qkv_bias=model.qkv_bias,
        fused=model.fused_qkv,
        ffn=model.ffn.name,
        norm=model.norm.name,
        norm_place=model.norm_place.name,
        norm_weight=model.norm_weight,
        norm_eps=model.norm_eps,
        qk_norm=model.qk_norm.name,
        learned_positions=model.position is Position.learned,
        rotary=rotary_of(model) if model.position is Position.rotary else None,
        window=model.window,
        full_every=model.full_every,
        attention_scale=model.attention_scale,
        attention_softcap=model.attention_softcap,
        softcap=model.logit_softcap,
        z_loss=model.z_loss,
        embedding_scale=1.0 if model.embedding_scale is None else model.embedding_scale,
        embedding_norm=model.embedding_norm,
        std=model.init_std,
        residual=model.init_residual.name,
        embedding_std=model.init_embedding_std,
        x0=model.x0,
        skips=model.skips,
        value_tables=model.value_embeddings,
        experts=experts_of(model),
        mup_dim=model.mup_base_dim,
        mup_head=model.mup_base_head_dim,
    )


def rotary_of(model: ModelConfig) -> Rotary:
    rotary = model.rotary
    return Rotary(
        rotary.theta,
        model.context if rotary.original_context is None else rotary.original_context,
        rotary.share,
        rotary.scaling.name,
        rotary.factor,
        rotary.low_frequency,
        rotary.high_frequency,
        rotary.beta_fast,
        rotary.beta_slow,
        rotary.magnitude,
        rotary.windows,
    )


def experts_of(model: ModelConfig) -> Experts | None:
    moe = model.moe
    if moe.experts == 0:
        return None
    return Experts(
        moe.experts,
        moe.top_k,
        model.feedforward_dim if moe.dim is None else moe.dim,
        moe.shared,
        moe.dense_layers,
        sigmoid=moe.score.name == "sigmoid",
        normalized=moe.normalize,
        scale=moe.scale,
        balance=moe.balance.name,
        balance_weight=moe.balance_weight,
        bias_rate=moe.bias_rate,
        z_loss=moe.z_loss,
        forced=moe.forced_balance,
    )


def recipe_of(config: Config, lrs: tuple[float, ...] = LRS) -> Recipe:
    o = config.optimizer
    return Recipe(o.kind.name, lrs, o.weight_decay, o.beta1, o.beta2, o.eps, o.clip)


def batches() -> list[Batch]:
    """A step's sequences have from 0 to all of their labels. In the second step the first 3 sequences have none, so
    that one rank of 4 has none and neither has the first micro-batch of others; in the fourth the first 6 have one
    label in all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(len(LRS)):
        text = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
        labels = text[:, 1:].clone()
        share = torch.rand(SEQUENCES, 1, generator=generator)
        labels[torch.rand(SEQUENCES, LENGTH, generator=generator) > share] = -100
        if step == 1:
            labels[:3] = -100
        if step == 3:
            labels[:6] = -100
            labels[4, 7] = text[4, 8]
        found.append(Batch(text[:, :-1].clone(), labels))
    return found


def slices(batch: Batch, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
    """A rank's micro-batches: ranks take slices of the global batch in their order."""
    each = len(batch.tokens) // ranks
    for start in range(rank * each, (rank + 1) * each, micro_batch):
        yield Batch(batch.tokens[start : start + micro_batch], batch.labels[start : start + micro_batch])
