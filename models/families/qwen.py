"""Qwen2 (Yang et al. 2024) and Qwen3 (Yang et al. 2025)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import ModelConfig, QKNorm
from models.families.family import Fields
from models.families.llama import Plain
from models.families.windows import FULL, SLIDING, layer_types, windows_of

QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


class Qwen2(Plain):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**Plain.fixed, "qkv_bias": True}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        types = layer_types(config)
        if SLIDING not in types:
            windows = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.layers}
            return super().write(config) | windows
        first = config.layers if FULL in types else 0  # for readers that do not know layer_types
        windows = {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": first}
        return super().write(config) | windows | {"layer_types": types}

    def read(self, theirs: Fields) -> dict[str, Any]:
        window = theirs.pop("sliding_window", 4096)
        if not theirs.pop("use_sliding_window", False):
            window = None
        first, types = theirs.pop("max_window_layers", 28), theirs.pop("layer_types", None)
        if types is None:
            layers = range(theirs["num_hidden_layers"])
            types = [SLIDING if window is not None and layer >= first else FULL for layer in layers]
        return super().read(theirs) | windows_of(types, window)


class Qwen3(Qwen2):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**Plain.fixed, "qk_norm": QKNorm.head}
    meant: ClassVar[Mapping[str, Any]] = {**Plain.meant, "attention_bias": False}
    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "head_dim": 128}
    names: ClassVar[Mapping[str, str]] = {**Plain.names, **QK_NORMS}


class Qwen3Moe(Plain):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **Plain.keys,
        "moe.experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.normalize": "norm_topk_prob",
    }
    fixed: ClassVar[Mapping[str, Any]] = Qwen3.fixed
    meant: ClassVar[Mapping[str, Any]] = {
        **Qwen3.meant,
        "decoder_sparse_step": 1,
        "output_router_logits": False,
    }
    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "norm_topk_prob": False}
    names: ClassVar[Mapping[str, str]] = {**Qwen3.names, "feedforward.router": "mlp.gate"}
    experts: ClassVar[Mapping[str, str]] = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        window = {"use_sliding_window": config.window is not None, "sliding_window": config.window}
        window |= {"max_window_layers": config.layers}  # not read, and in all files
        experts = {"moe_intermediate_size": config.expert_dim, "mlp_only_layers": list(range(config.moe.dense_layers))}
        return super().write(config) | window | experts

    def read(self, theirs: Fields) -> dict[str, Any]:
        window = theirs.pop("sliding_window", 4096)
        if not theirs.pop("use_sliding_window", False):
            window = None
        theirs.pop("max_window_layers", None)  # all blocks are alike
        if "num_local_experts" in theirs:  # as transformers 5 has it in memory
            theirs.setdefault("num_experts", theirs.pop("num_local_experts"))
        dense = theirs.pop("mlp_only_layers", None) or []
        if sorted(dense) != list(range(len(dense))):
            raise ValueError(f"mlp_only_layers={dense}; in Espalier the first blocks are those without experts")
        moe = {"moe.dim": theirs.take("moe_intermediate_size"), "moe.dense_layers": len(dense)}
        return super().read(theirs) | moe | {"window": window}
