"""Counts without torch, against models built on the meta device, published numbers and torch's own counter."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from models.config import Attention as Kernel
from models.config import Latent, ModelConfig, MoE, Norm, Position
from models.decoder import Decoder
from models.flops import active_parameters, flops_per_token, parameters
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


def counted_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """Of forward and backward, by torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    model = random_decoder(config)
    tokens = random_tokens(config, batch, seq)
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, labels=tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "config",
    [
        tiny(vocab_multiple=1, attention=Kernel.math),
        tiny(vocab_multiple=1, attention=Kernel.math, tied_head=False, bias=False, ffn_dim=50, layers=3),
        tiny(vocab_multiple=1, attention=Kernel.math, heads=6, kv_heads=2),
    ],
    ids=["tied", "untied", "grouped heads"],
)
@pytest.mark.parametrize("seq", [16, 5])
def test_flops_are_those_of_torchs_counter(config: ModelConfig, seq: int) -> None:
    """The math kernel, since the fused ones compute scores again in backward, which is not counted."""
    [counted] = run_ranks(1, counted_flops, config, 2, seq)
    assert flops_per_token(config, seq) == pytest.approx(counted / (2 * seq), rel=0.01)


def test_flops_of_gpt2_124m() -> None:
    """nanoGPT's 855.4 million a token, which also counts 47 rows of padding, norms and biases."""
    padding, norms_and_biases = 47 * 768, 121_344
    assert flops_per_token(gpt2("124M"), 1024) + 6 * (padding + norms_and_biases) == pytest.approx(855.4e6, abs=0.05e6)


def test_an_unknown_vocabulary_is_said() -> None:
    for count in (parameters, lambda config: flops_per_token(config, 8), lambda config: config.padded_vocab_size):
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
