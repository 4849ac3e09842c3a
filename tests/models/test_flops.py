"""Counts without torch, against models built on the meta device, published numbers and torch's own counter."""

import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.config import Attention as Kernel
from models.config import FeedForward, Latent, ModelConfig, MoE, Norm, NormPlace, Position, QKNorm, Score
from models.decoder import Decoder
from models.flops import (
    active_parameters,
    embedding_parameters,
    flops_per_token,
    parameters,
    seen_flops_per_token,
    tokens_seen,
)
from models.kernels import visible
from tests.models.build import random_decoder, random_tokens, tiny
from tests.ranks import ROOT, run_ranks

# layers, heads, dim; parameters with a vocabulary of 50304 (llm.c, build-nanogpt) and of 50257 (transformers)
GPT2 = {
    "124M": ((12, 12, 768), 124_475_904, 124_439_808),
    "350M": ((24, 16, 1024), 354_871_296, 354_823_168),
    "774M": ((36, 20, 1280), 774_090_240, 774_030_080),
    "1558M": ((48, 25, 1600), 1_557_686_400, 1_557_611_200),
}


def gpt2(size: str) -> ModelConfig:
    layers, heads, dim = GPT2[size][0]
    return ModelConfig(layers=layers, heads=heads, dim=dim, context=1024, vocab_size=50257)


@pytest.mark.parametrize("size", GPT2)
def test_parameters_of_gpt2(size: str) -> None:
    _, padded, unpadded = GPT2[size]
    with torch.device("meta"):
        model = Decoder(gpt2(size))
    assert sum(parameter.numel() for parameter in model.parameters()) == padded
    assert parameters(gpt2(size)) == unpadded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn_dim", [None, 50])
@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_parameters_of_other_shapes(
    bias: bool, tied: bool, ffn_dim: int | None, kv_heads: int | None, fused: bool
) -> None:
    shape = {"bias": bias, "tied_head": tied, "ffn_dim": ffn_dim, "kv_heads": kv_heads, "fused_qkv": fused}
    config = tiny(**shape, vocab_multiple=1)
    assert parameters(config) == sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert parameters(tiny(**shape, vocab_multiple=128)) == parameters(config)


LATENT = Latent(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5)


def test_latent_attention() -> None:
    """A number of multiplications for each weight of a matrix, and of the square as wide as keys and values."""
    plain = {"layers": 2, "dim": 24, "heads": 3, "bias": False, "position": Position.rotary}
    dense, latent, direct = (
        tiny(**plain, **changes) for changes in ({}, {"latent": LATENT}, {"latent": replace(LATENT, q_rank=None)})
    )
    of_dense, of_norms = 4 * 24 * 24, 10 + 14
    kv_and_out = 24 * (10 + 4) + 10 * 3 * (6 + 5) + 3 * 5 * 24
    of_latent, of_direct = 24 * 14 + 14 * 3 * 10 + kv_and_out, 24 * 3 * 10 + kv_and_out
    assert parameters(latent) - parameters(dense) == 2 * (of_latent + of_norms - of_dense)
    assert parameters(direct) - parameters(dense) == 2 * (of_direct + 10 - of_dense)
    square = 3 * (10 + 5) - 2 * 24
    for config, weights in ((latent, of_latent), (direct, of_direct)):
        more = flops_per_token(config, 8) - flops_per_token(dense, 8)
        assert more == 3 * 2 * 2 * (weights - of_dense + 8 * square)


def test_further_tokens() -> None:
    """Each is a block, a product of two vectors and the head again; its norms are three."""
    plain = {"layers": 2, "dim": 24, "heads": 3, "bias": False, "position": Position.rotary, "norm": Norm.rmsnorm}
    one, more, deeper = tiny(**plain), tiny(**plain, mtp=2), tiny(**plain | {"layers": 4})
    join = 2 * 24 * 24
    assert parameters(more) - parameters(deeper) == 2 * (join + 3 * 24)
    assert flops_per_token(more, 8) - flops_per_token(deeper, 8) == 3 * 2 * 2 * (join + 67 * 24)
    assert active_parameters(more) == parameters(more) > parameters(one)


def test_parameters_of_experts() -> None:
    """A router's row and two matrices an expert; what it counts is no parameter."""
    moe = MoE(experts=5, top_k=2, dim=14, shared=1, dense_layers=1)
    dense, sparse = tiny(layers=3, bias=False), tiny(layers=3, bias=False, moe=moe)
    dim, ffn, expert = 24, 96, 2 * 24 * 14
    assert parameters(sparse) - parameters(dense) == 2 * (5 * dim + (5 + 1) * expert - 2 * dim * ffn)
    assert parameters(sparse) - active_parameters(sparse) == 2 * 3 * expert
    assert active_parameters(dense) == parameters(dense)
    more = flops_per_token(sparse, 8) - flops_per_token(dense, 8)
    assert more == 6 * 2 * (5 * dim + (2 + 1) * expert - 2 * dim * ffn)


# Qwen3, by its technical report (2025) and config.json
QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "kv_heads": 8,
    "vocab_size": 151936,
    "context": 4096,
    "bias": False,
    "norm": Norm.rmsnorm,
    "qk_norm": QKNorm.head,
    "position": Position.rotary,
    "ffn": FeedForward.swiglu,
}


def test_embeddings_are_what_published_sizes_leave_out() -> None:
    """Pythia's table to the parameter (Biderman et al. 2023), the cards of Qwen3 to their digits, and GPT-2 by hand."""
    pythia = ModelConfig(
        layers=12, heads=12, dim=768, context=2048, vocab_size=50304, position=Position.rotary, tied_head=False
    )
    assert parameters(pythia) == 162_322_944
    assert parameters(pythia) - embedding_parameters(pythia) == 85_056_000
    small = ModelConfig(layers=28, dim=1024, heads=16, ffn_dim=3072, **QWEN3)
    large = ModelConfig(layers=36, dim=4096, heads=32, ffn_dim=12288, tied_head=False, **QWEN3)
    moe = MoE(experts=128, top_k=8, dim=768)
    sparse = ModelConfig(layers=48, dim=2048, heads=32, moe=moe, tied_head=False, **QWEN3 | {"kv_heads": 4})
    for config, total, without in ((small, 0.6, 0.44), (large, 8.2, 6.95), (sparse, 30.5, 29.9)):
        assert parameters(config) / 1e9 == pytest.approx(total, rel=0.01)
        assert (parameters(config) - embedding_parameters(config)) / 1e9 == pytest.approx(without, rel=0.01)
    assert active_parameters(sparse) // 1e8 == 33  # the card's 3.3 billion are cut off, not rounded
    assert embedding_parameters(gpt2("124M")) == (50257 + 1024) * 768
    valued = tiny(value_embeddings=1, position=Position.none, kv_heads=1, tied_head=False)
    assert embedding_parameters(valued) == 67 * (24 + 24 + 8)


LLAMA: dict[str, Any] = {
    "bias": False,
    "norm": Norm.rmsnorm,
    "position": Position.rotary,
    "ffn": FeedForward.swiglu,
    "ffn_dim": 50,
    "fused_qkv": False,
}
FAMILIES = {
    "gpt2": {},
    "gpt2 untied": {"tied_head": False, "bias": False, "ffn_dim": 50, "layers": 3},
    "llama": {**LLAMA, "heads": 6, "kv_heads": 2, "tied_head": False},
    "qwen3": {**LLAMA, "heads": 4, "kv_heads": 2, "head_dim": 10, "qk_norm": QKNorm.head},
    "olmo": {
        **LLAMA,
        "qk_norm": QKNorm.all,
        "norm_place": NormPlace.after,
        "layers": 4,
        "window": 5,
        "full_every": 4,
        "tied_head": False,
    },
    "gemma": {
        **LLAMA,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": FeedForward.geglu,
        "norm_place": NormPlace.both,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "attention_scale": 0.2,
        "embedding_scale": 5.0,
        "window": 7,
        "full_every": 2,
    },
    "moe": {
        **LLAMA,
        "layers": 3,
        "kv_heads": 1,
        "moe": MoE(experts=5, top_k=2, dim=14, shared=2, dense_layers=1, score=Score.sigmoid),
    },
    "moe without gates": {"bias": False, "moe": MoE(experts=4, top_k=3)},
    "speedrun": {
        **LLAMA,
        "ffn": FeedForward.relu2,
        "layers": 5,
        "tied_head": False,
        "norm_weight": False,
        "qk_norm": QKNorm.head,
        "embedding_norm": True,
        "logit_softcap": 15.0,
        "value_embeddings": 2,
        "x0": True,
        "skips": True,
        "window": 6,
        "full_every": 2,
    },
}


def family(name: str) -> ModelConfig:
    """The math kernel, since in backward fused ones compute scores again, which is not counted; no padding."""
    return tiny(vocab_multiple=1, attention=Kernel.math, **FAMILIES[name])


def product_by_expert(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Of operations that torch's counter knows."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])


Counted = tuple[int, int]  # all operations of forward and backward, and those of attention among them


def counted_flops(cases: list[tuple[ModelConfig, int]], batch: int) -> list[Counted]:
    """By torch's counter. Products of a batch of matrices with another are those of attention alone."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for config, seq in cases:
        model = random_decoder(config)
        tokens = random_tokens(config, batch, seq)
        with FlopCounterMode(display=False) as counter, patch("models.moe.grouped_product", product_by_expert):
            model(tokens=tokens, labels=tokens).backward()
        found.append((counter.get_total_flops(), counter.get_flop_counts()["Global"][torch.ops.aten.bmm]))
    return found


BATCH, LENGTHS = 2, (16, 5)


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, int], Counted]:
    cases = [(name, seq) for name in FAMILIES for seq in LENGTHS]
    [found] = run_ranks(1, counted_flops, [(family(name), seq) for name, seq in cases], BATCH)
    return dict(zip(cases, found, strict=True))


@pytest.mark.torch211
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_torchs_counter(name: str, seq: int, counted: dict[tuple[str, int], Counted]) -> None:
    """To the last one. Of what is seen: those of attention by the share of the square that masks leave."""
    config, tokens = family(name), BATCH * seq
    total, attention = counted[name, seq]
    assert flops_per_token(config, seq) * tokens == total
    places = torch.arange(seq)
    masks = [visible(places, places, config.window_of(layer)) for layer in range(config.layers)]
    share = sum(mask.sum().item() for mask in masks) / (config.layers * seq**2)
    assert seen_flops_per_token(config, seq) * tokens == pytest.approx(total - attention * (1 - share), rel=1e-12)


@pytest.mark.parametrize(
    ("length", "window", "mean"), [(4, None, 2.5), (4, 4, 2.5), (4, 9, 2.5), (4, 1, 1), (4, 2, 1.75)]
)
def test_tokens_seen(length: int, window: int | None, mean: float) -> None:
    assert tokens_seen(length, window) == mean


# Operations a token of a model with 50304 rows, in millions.
NANOGPT = {"124M": 855.4, "350M": 2420, "774M": 5200, "1558M": 10280}


@pytest.mark.parametrize("size", GPT2)
def test_flops_of_gpt2_as_nanogpt_counts(size: str) -> None:
    """It also counts 47 rows of padding, norms and biases."""
    layers, _, dim = GPT2[size][0]
    padding, norms_and_biases = 47 * dim, layers * 13 * dim + 2 * dim
    found = flops_per_token(gpt2(size), 1024) + 6 * (padding + norms_and_biases)
    assert found / 1e6 == pytest.approx(NANOGPT[size], abs=0.05 if size == "124M" else 5)


def test_flops_of_gpt2_124m_as_llmc_counts() -> None:
    """llm.c: 6 for each of 124,475,904 parameters, positions among them, and half the square; 803.5 million. Products
    alone: 798.0 (both with padding)."""
    padding, norms_and_biases, positions = 47 * 768, 121_344, 1024 * 768
    products = seen_flops_per_token(gpt2("124M"), 1024) + 6 * padding
    assert products / 1e6 == pytest.approx(798.0, abs=0.1)
    assert (products + 6 * (norms_and_biases + positions)) / 1e6 == pytest.approx(803.5, abs=0.1)


def test_an_unknown_vocabulary_is_said() -> None:
    for count in (
        parameters,
        embedding_parameters,
        lambda config: flops_per_token(config, 8),
        lambda config: config.padded_vocab_size,
    ):
        with pytest.raises(ValueError, match=r"model\.vocab_size"):
            count(ModelConfig())


@pytest.mark.parametrize(
    ("vocabulary", "multiple", "padded"),
    [(50257, 128, 50304), (257, 128, 384), (256, 128, 256), (67, 1, 67), (1, 64, 64)],
)
def test_padded_vocabulary(vocabulary: int, multiple: int, padded: int) -> None:
    assert ModelConfig(vocab_size=vocabulary, vocab_multiple=multiple).padded_vocab_size == padded


def test_counts_need_no_torch() -> None:
    command = "import sys, models.config, models.flops, models.derive, models.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0
