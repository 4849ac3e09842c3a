"""DeepSeek-V3 (DeepSeek-AI 2024)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.config import ModelConfig, RotaryScaling, Score
from models.families.family import Family, Fields, Piece, same
from models.families.llama import Plain
from models.families.rope import named, rope_to

NORM_EPS = 1e-6  # of the norms in attention, whatever rms_norm_eps says
STEPS = {"token_norm": "enorm", "stream_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


class DeepseekV3(Plain):
    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **Plain.keys,
        "latent.kv_rank": "kv_lora_rank",
        "latent.q_rank": "q_lora_rank",
        "latent.nope_dim": "qk_nope_head_dim",
        "latent.rope_dim": "qk_rope_head_dim",
        "latent.value_dim": "v_head_dim",
        "moe.experts": "n_routed_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.shared": "n_shared_experts",
        "moe.dense_layers": "first_k_dense_replace",
        "moe.groups": "n_group",
        "moe.top_groups": "topk_group",
        "moe.normalize": "norm_topk_prob",
        "moe.scale": "routed_scaling_factor",
        "mtp": "num_nextn_predict_layers",
    }
    fixed: ClassVar[Mapping[str, Any]] = {**Plain.fixed, "moe.score": Score.sigmoid}
    meant: ClassVar[Mapping[str, Any]] = {
        **Plain.meant,
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "rope_interleave": True,
        "output_router_logits": False,
    }
    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "num_nextn_predict_layers": 0}
    neutral: ClassVar[frozenset[str]] = Family.neutral | {"moe.bias_rate", "mtp_weight"}
    # A file's copies of the table and the head for what predicts further tokens.
    buffers: ClassVar[tuple[str, ...]] = (
        *Plain.buffers,
        "shared_head.head.weight",
        *(f"{digit}.embed_tokens.weight" for digit in range(10)),
    )
    names: ClassVar[Mapping[str, str]] = {
        **Plain.names,
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "feedforward.router": "mlp.gate",
        **{f"feedforward.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    }
    experts: ClassVar[Mapping[str, str]] = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        found = super().write(config) | {"moe_intermediate_size": config.expert_dim} | _rope_to(config)
        del found["head_dim"]
        return found

    def read(self, theirs: Fields) -> dict[str, Any]:
        for derived in ("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "auto_map"):
            theirs.pop(derived, None)
        heads, of_keys = theirs["num_attention_heads"], theirs.pop("num_key_value_heads", None)
        if of_keys not in (None, heads):
            raise ValueError(f"num_key_value_heads={of_keys}; in latent attention all {heads} heads have keys")
        if theirs["rms_norm_eps"] != NORM_EPS:
            raise ValueError(f"rms_norm_eps={theirs['rms_norm_eps']}; a {self.model_type} has {NORM_EPS} in attention")
        own = {"moe.dim": theirs.take("moe_intermediate_size"), "attention_scale": _scale_of(theirs)}
        theirs |= {"num_key_value_heads": None, "head_dim": None}
        return super().read(theirs) | own

    def obstacles(self, config: ModelConfig) -> list[str]:
        found = [] if config.norm_eps == NORM_EPS else [f"model.norm_eps={config.norm_eps}"]
        found += [] if config.key_value_heads == config.heads else [f"model.kv_heads={config.kv_heads}"]
        config = replace(config, norm_eps=NORM_EPS, kv_heads=None)
        found += [f"model.moe.{name}=0" for name in ("experts", "shared") if getattr(config.moe, name) == 0]
        found += [] if config.latent.kv_rank > 0 else ["model.latent.kv_rank=0"]
        return found + super().obstacles(config)

    def piece(self, config: ModelConfig, name: str) -> Piece | None:
        if name.startswith("mtp.steps."):
            return self._further(config, name)
        if name.endswith(".router.bias"):
            return same(name, f"model.layers.{name.split('.')[1]}.mlp.gate.e_score_correction_bias")
        found = super().piece(config, name)
        part = name.rpartition(".attention.")[2]
        if found is None or part not in ("q.weight", "q_up.weight", "kv_down.weight"):
            return found
        kept, turned = config.latent.nope_dim, config.latent.rope_dim
        size = config.latent.kv_rank + turned if part == "kv_down.weight" else kept + turned
        return replace(
            found,
            join=lambda parts: halved(parts[0], size, turned),
            split=lambda value: (interleaved(value, size, turned),),
        )

    def _further(self, config: ModelConfig, name: str) -> Piece | None:
        """Of a step for a further token, which lies behind the layers."""
        _, _, number, inner = name.split(".", 3)
        layer = config.layers + int(number)
        if inner.startswith("block."):
            found = self.piece(config, f"blocks.{layer}.{inner.removeprefix('block.')}")
            return None if found is None else replace(found, ours=name)
        part, _, kind = inner.rpartition(".")
        return same(name, f"model.layers.{layer}.{STEPS[part]}.{kind}")


def halved(value: Tensor, size: int, turned: int) -> Tensor:
    """Of each `size` rows the last `turned`, which are pairs of neighbours with them, as models.position has pairs."""
    kept, pairs = value.unflatten(0, (-1, size)).split([size - turned, turned], dim=1)
    return torch.cat([kept, pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)], dim=1).flatten(0, 1)


def interleaved(value: Tensor, size: int, turned: int) -> Tensor:
    """The way back."""
    kept, pairs = value.unflatten(0, (-1, size)).split([size - turned, turned], dim=1)
    return torch.cat([kept, pairs.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)], dim=1).flatten(0, 1)


def _scale_of(theirs: Fields) -> float | None:
    """(0.1 mscale_all_dim ln(factor) + 1)^2 / sqrt(width of a head's keys)."""
    rope = named(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    if rope.get("rope_type") != "yarn" or not rope.get("mscale_all_dim") or "factor" not in rope:
        return None
    width = theirs["qk_nope_head_dim"] + theirs["qk_rope_head_dim"]
    return float((0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2 / math.sqrt(width))


def _rope_to(config: ModelConfig) -> dict[str, Any]:
    """With mscale_all_dim for the scale, and with mscale where cosines and sines stay as they are."""
    found, rotary = rope_to(config), config.rotary
    scale = config.attention_scale
    if rotary.scaling is not RotaryScaling.yarn or scale is None or rotary.factor <= 1:
        return found
    all_dim = round((math.sqrt(scale * math.sqrt(config.head_size)) - 1) / (0.1 * math.log(rotary.factor)), 12)
    found["rope_scaling"] |= {"mscale_all_dim": all_dim, "type": "yarn"}  # type is for the code of the release
    if rotary.magnitude == 1 and all_dim != 0:
        found["rope_scaling"]["mscale"] = all_dim
        del found["rope_scaling"]["attention_factor"]
    return found
