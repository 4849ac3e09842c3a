"""The oracle's decoder is that of the published families: it gives what transformers gives with the same weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle_model import Experts, Rotary, Shape, Weights, logits, parameter_shapes
from tests.ranks import run_ranks

LENGTH = 24
SIZES: dict[str, Any] = {"layers": 4, "dim": 24, "heads": 4, "ffn_dim": 34, "context": 32, "vocab_size": 67}
MODERN: dict[str, Any] = SIZES | {
    "bias": False,
    "fused": False,
    "ffn": "swiglu",
    "norm": "rmsnorm",
    "learned_positions": False,
}
PLAIN = Rotary(10_000.0, 32)
# Beside each shape what transformers is told that does not follow from it in the same way for all.
FAMILIES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "llama": (
        Shape(**MODERN, tied=False, kv_heads=2, rotary=Rotary(500.0, 8, scaling="llama3", factor=4.0)),
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "qwen2": (Shape(**MODERN, tied=True, kv_heads=2, qkv_bias=True, rotary=PLAIN), {}),
    "qwen3": (Shape(**MODERN, tied=True, kv_heads=2, head_dim=8, qk_norm="head", rotary=PLAIN), {"head_dim": 8}),
    "olmo3": (
        Shape(
            **MODERN,
            tied=False,
            norm_place="after",
            qk_norm="all",
            window=5,
            full_every=4,
            rotary=Rotary(100.0, 32, scaling="yarn", factor=8.0, fast=4.0, slow=1.0, windows=False),
        ),
        {
            "sliding_window": 5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 8.0,
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "gemma2": (
        Shape(
            **MODERN | {"ffn": "geglu"},
            tied=True,
            kv_heads=2,
            head_dim=8,
            norm_place="both",
            window=5,
            full_every=2,
            attention_scale=1 / math.sqrt(12),
            attention_softcap=2.0,
            softcap=3.0,
            embedding_scale=math.sqrt(24),
            rotary=PLAIN,
        ),
        {
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "qwen3_moe": (
        Shape(**MODERN, tied=False, kv_heads=2, head_dim=8, qk_norm="head", rotary=PLAIN, experts=Experts(5, 2, 14)),
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "norm_topk_prob": True,
        },
    ),
}

AFTER = {"attention_post_norm": "post_attention_layernorm", "feedforward_post_norm": "post_feedforward_layernorm"}
NORMS = {
    "before": {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"},
    "after": AFTER,
    "both": {"attention_norm": "input_layernorm", "feedforward_norm": "pre_feedforward_layernorm", **AFTER},
}


def random_weights(shape: Shape) -> Weights:
    """Every part matters, and logits are of order 1."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, size in parameter_shapes(shape).items():
        noise = torch.randn(size, dtype=torch.float64, generator=generator)
        found[name] = noise / math.sqrt(size[-1]) if len(size) > 1 else 0.3 * noise + ("norm" in name)
        if name.endswith((".router.bias", ".router.load", ".router.dropped")):
            found[name] = torch.zeros_like(noise)
    return found


def renamed(family: str, shape: Shape, weights: Weights) -> Weights:
    """Under the names of transformers."""
    names = {
        "attention.out": "self_attn.o_proj",
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
        **{f"feedforward.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        **NORMS[shape.norm_place],
        "feedforward.router": "mlp.gate",
    }
    found = {}
    for name, value in weights.items():
        part, _, kind = name.rpartition(".")
        if part.startswith("blocks."):
            _, layer, part = part.split(".", 2)
            if part in names and (part != "feedforward.router" or kind == "weight"):
                found[f"model.layers.{layer}.{names[part]}.{kind}"] = value
    found |= {"model.embed_tokens.weight": weights["embed.tokens.weight"], "model.norm.weight": weights["norm.weight"]}
    found["lm_head.weight"] = weights["embed.tokens.weight" if shape.tied else "head.weight"]
    for number in range(shape.layers) if shape.experts is not None else ():
        gate, up, down = (weights[f"blocks.{number}.feedforward.experts.{part}"] for part in ("gate", "up", "down"))
        found[f"model.layers.{number}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"model.layers.{number}.mlp.experts.down_proj"] = down
    if family == "gemma2":  # which adds 1 to the weights of norms
        found = {name: value - 1 if "norm" in name else value for name, value in found.items()}
    return found


def of_transformers(family: str, shape: Shape, told: dict[str, Any], weights: Weights, tokens: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}} | told,
        num_hidden_layers=shape.layers,
        hidden_size=shape.dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        intermediate_size=shape.ffn_dim,
        max_position_embeddings=shape.context,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
        rms_norm_eps=shape.norm_eps,
        pad_token_id=0,
        attn_implementation="eager",
        experts_implementation="eager",  # the other has no float64
    )
    model = AutoModelForCausalLM.from_config(config).double().eval()
    missing = model.load_state_dict(renamed(family, shape, weights), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def differences() -> dict[str, tuple[float, float]]:
    """The largest of any logit, and the largest logit."""
    tokens = torch.randint(67, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = {}
    for family, (shape, told) in FAMILIES.items():
        weights = random_weights(shape)
        ours, theirs = logits(weights, shape, tokens)[0], of_transformers(family, shape, told, weights, tokens)
        found[family] = float((ours - theirs).abs().max()), float(ours.abs().max())
    return found


@pytest.fixture(scope="module")
def compared() -> dict[str, tuple[float, float]]:
    [found] = run_ranks(1, differences, timeout=100)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_gives_what_transformers_gives(family: str, compared: dict[str, tuple[float, float]]) -> None:
    """Within float32: transformers computes norms and angles in it whatever the dtype."""
    difference, largest = compared[family]
    assert difference <= 1e-5 * largest and largest > 1
