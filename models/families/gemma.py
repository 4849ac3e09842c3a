"""Gemma 2 (Gemma Team 2024)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.config import FeedForward, ModelConfig, NormPlace
from models.families.family import Fields, Piece
from models.families.llama import PROJECTIONS, Plain
from models.families.windows import FULL, SLIDING, layer_types, windows_of

BOTH = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "feedforward_norm": "pre_feedforward_layernorm",
    "feedforward_post_norm": "post_feedforward_layernorm",
}


class Gemma2(Plain):
    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    heads_divide = True
    keys: ClassVar[Mapping[str, str]] = {
        **Plain.keys,
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    }
    fixed: ClassVar[Mapping[str, Any]] = {**Plain.fixed, "ffn": FeedForward.geglu, "norm_place": NormPlace.both}
    meant: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "attention_bias": False,
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **Plain.defaults,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    }
    names: ClassVar[Mapping[str, str]] = {**PROJECTIONS, **BOTH}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        scale = config.attention_scale
        return super().write(config) | {
            "query_pre_attn_scalar": config.head_size if scale is None else max(round(scale**-2), 1),
            # transformers wants a window where no block uses it.
            "sliding_window": config.window or config.context,
            "layer_types": layer_types(config),
        }

    def read(self, theirs: Fields) -> dict[str, Any]:
        theirs.pop("hidden_act", None)  # in older files beside hidden_activation, and not read
        types, window = theirs.pop("layer_types", None), theirs.pop("sliding_window", 4096)
        if types is None:
            types = [FULL if layer % 2 else SLIDING for layer in range(theirs["num_hidden_layers"])]
        scale = theirs.take("query_pre_attn_scalar") ** -0.5
        found = super().read(theirs) | windows_of(types, window)
        return found | {"attention_scale": scale, "embedding_scale": theirs["hidden_size"] ** 0.5}

    def piece(self, config: ModelConfig, name: str) -> Piece | None:
        found = super().piece(config, name)
        return above_one(found) if found is not None and name.endswith("norm.weight") else found


def above_one(norm: Piece) -> Piece:
    """They keep how far the weight of a norm is above 1, which bf16 can hold where it cannot hold the sum."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return parts[0].to(torch.promote_types(parts[0].dtype, torch.float32)) + 1

    def split(value: Tensor) -> Sequence[Tensor]:
        return (value - 1,)

    return Piece(norm.ours, norm.theirs, join, split)
