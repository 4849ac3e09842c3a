"""GPT-2 to and from the Hugging Face format: config.json and state dict."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

# ours -> theirs inside a block; True where theirs is a Conv1D, which keeps its weight as [in, out]
_BLOCK_NAMES = {
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "feedforward_norm": ("ln_2", False),
    "feedforward.up": ("mlp.c_fc", True),
    "feedforward.down": ("mlp.c_proj", True),
}

# What changes the mathematics of theirs and is one way in ours.
_MEANT = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def _names(config: ModelConfig) -> dict[str, tuple[str, bool]]:
    """Our name of each parameter -> theirs, and whether the weight is transposed."""
    names = {
        "embed.tokens.weight": ("transformer.wte.weight", False),
        "embed.positions.weight": ("transformer.wpe.weight", False),
        "norm.weight": ("transformer.ln_f.weight", False),
        "norm.bias": ("transformer.ln_f.bias", False),
    }
    if not config.tied_head:
        names["head.weight"] = ("lm_head.weight", False)
    for layer in range(config.layers):
        for ours, (theirs, transposed) in _BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                flip = transposed and kind == "weight"
                names[f"blocks.{layer}.{ours}.{kind}"] = (f"transformer.h.{layer}.{theirs}.{kind}", flip)
    return names


def _heads_to_thirds(qkv: Tensor, heads: int) -> Tensor:
    """Rows grouped by head (q, k, v of head 0, then of head 1, ...) -> all q, all k, all v."""
    return qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _thirds_to_heads(qkv: Tensor, heads: int) -> Tensor:
    return qkv.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a GPT2LMHeadModel. Raises ValueError for a model that GPT-2 cannot express."""
    other = {
        "model.bias=false": not config.bias,
        f"model.kv_heads={config.kv_heads}": config.key_value_heads != config.heads,
        "model.fused_qkv=false": not config.fused_qkv,
        f"model.logit_softcap={config.logit_softcap}": config.logit_softcap is not None,
        "model.x0=true": config.x0,
        "model.skips=true": config.skips,
        f"model.value_embeddings={config.value_embeddings}": config.value_embeddings > 0,
        f"model.moe.experts={config.moe.experts}": config.moe.experts > 0,
    }
    if differing := [setting for setting, differs in other.items() if differs]:
        raise ValueError(f"Hugging Face's GPT-2 has no counterpart of {', '.join(differing)}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn_dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tied_head,
    }


def config_from_huggingface(theirs: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for what is not a GPT-2 as we have it."""
    wrong = [f"{key}={theirs.get(key, value)}" for key, value in _MEANT.items() if theirs.get(key, value) != value]
    if theirs.get("model_type") != "gpt2" or wrong:
        raise ValueError(f"not a GPT-2 as Espalier has it: model_type={theirs.get('model_type')} {' '.join(wrong)}")
    if len({theirs.get(f"{place}_pdrop", 0.1) for place in ("resid", "embd", "attn")}) > 1:
        raise ValueError("resid_pdrop, embd_pdrop and attn_pdrop differ; model.dropout is one number")
    return ModelConfig(
        layers=theirs["n_layer"],
        dim=theirs["n_embd"],
        heads=theirs["n_head"],
        ffn_dim=theirs.get("n_inner"),
        context=theirs["n_positions"],
        vocab_size=theirs["vocab_size"],
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        init_std=theirs.get("initializer_range", 0.02),
        dropout=theirs.get("resid_pdrop", 0.1),
        tied_head=theirs.get("tie_word_embeddings", True),
    )


def state_to_huggingface(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under GPT2LMHeadModel's names, without the vocabulary's padding. `state`: whole tensors by our names."""
    theirs = {}
    for ours, (name, transposed) in _names(config).items():
        value = state[ours]
        if ".qkv." in ours:
            value = _heads_to_thirds(value, config.heads)
        if ours in ("embed.tokens.weight", "head.weight"):
            value = value[: config.vocab_size]
        theirs[name] = (value.T if transposed else value).contiguous()
    if config.tied_head:
        theirs["lm_head.weight"] = theirs["transformer.wte.weight"]
    return theirs


def state_from_huggingface(config: ModelConfig, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under our names, the vocabulary padded with zeros. Raises ValueError that names what is missing, too much
    or of another vocabulary."""
    named = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": value
        for name, value in theirs.items()
    }
    wanted = {name for name, _ in _names(config).values()}
    buffers = {name for name in named if name.endswith((".attn.bias", ".attn.masked_bias"))}
    surplus = set(named) - wanted - buffers - ({"lm_head.weight"} if config.tied_head else set())
    if wanted - set(named) or surplus:
        raise ValueError(
            f"the Hugging Face weights lack {sorted(wanted - set(named))} and have {sorted(surplus)} in addition"
        )
    for name in wanted & {"transformer.wte.weight", "lm_head.weight"}:
        if named[name].shape[0] != config.vocab_size:
            raise ValueError(f"{name} has {named[name].shape[0]} rows, and vocab_size is {config.vocab_size}")
    state = {}
    for ours, (name, transposed) in _names(config).items():
        value = named[name].T if transposed else named[name]
        if ".qkv." in ours:
            value = _thirds_to_heads(value, config.heads)
        if ours in ("embed.tokens.weight", "head.weight"):
            value = F.pad(value, (0, 0, 0, config.padded_vocab_size - value.shape[0]))
        state[ours] = value.contiguous()
    return state
