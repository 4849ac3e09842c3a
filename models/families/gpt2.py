"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.config import ModelConfig
from models.families.family import TRAINING, Family, Fields, Piece, from_groups, same, to_groups

# Of a block; True where theirs is a Conv1D, which keeps its weight as [in, out].
BLOCK = {
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "feedforward_norm": ("ln_2", False),
    "feedforward.up": ("mlp.c_fc", True),
    "feedforward.down": ("mlp.c_proj", True),
}
ENDS = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


class Gpt2(Family):
    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    keys: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "context": "n_positions",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn_dim": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "init_std": "initializer_range",
        "tied_head": "tie_word_embeddings",
    }
    fixed: ClassVar[Mapping[str, Any]] = {}
    meant: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }
    # One weight of theirs is not made of three of ours here.
    neutral = TRAINING
    prefix = "transformer."
    token_table = "transformer.wte.weight"
    buffers = (".attn.bias", ".attn.masked_bias")

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}

    def read(self, theirs: Fields) -> dict[str, Any]:
        dropouts = {theirs.pop(f"{place}_pdrop", 0.1) for place in ("resid", "embd", "attn")}
        if len(dropouts) > 1:
            raise ValueError("resid_pdrop, embd_pdrop and attn_pdrop differ; model.dropout is one number")
        # n_ctx: n_positions once more; the others are of a head for classes, and of how fp16 is computed.
        for field in [*(field for field in theirs if field.startswith("summary_")), "n_ctx", "reorder_and_upcast_attn"]:
            theirs.pop(field, None)
        return {"dropout": dropouts.pop()}

    def piece(self, config: ModelConfig, name: str) -> Piece | None:
        path, _, kind = name.rpartition(".")
        if path in ENDS:
            return same(name, f"{ENDS[path]}.{kind}")
        _, layer, inner = path.split(".", 2)
        if inner not in BLOCK:
            return None
        theirs, transposed = BLOCK[inner]
        flip = transposed and kind == "weight"

        def join(parts: Sequence[Tensor]) -> Tensor:
            value = parts[0].T if flip else parts[0]
            return to_groups(config, value.chunk(3)) if inner == "attention.qkv" else value

        def split(value: Tensor) -> Sequence[Tensor]:
            if inner == "attention.qkv":
                value = torch.cat(from_groups(config, value))
            return (value.T if flip else value,)

        return Piece(name, (f"transformer.h.{layer}.{theirs}.{kind}",), join, split)
