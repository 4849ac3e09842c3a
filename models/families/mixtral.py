"""Mixtral (Jiang et al. 2024)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import ModelConfig
from models.families.family import Fields
from models.families.llama import Mistral, Plain


class Mixtral(Mistral):
    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **Mistral.keys,
        "moe.experts": "num_local_experts",
        "moe.top_k": "num_experts_per_tok",
    }
    meant: ClassVar[Mapping[str, Any]] = {**Plain.meant, "router_jitter_noise": 0.0, "output_router_logits": False}
    defaults: ClassVar[Mapping[str, Any]] = {**Mistral.defaults, "sliding_window": None}
    theta = 1_000_000.0
    names: ClassVar[Mapping[str, str]] = {**Plain.names, "feedforward.router": "block_sparse_moe.gate"}
    experts: ClassVar[Mapping[str, str]] = {
        "gate": "block_sparse_moe.experts.{}.w1",
        "up": "block_sparse_moe.experts.{}.w3",
        "down": "block_sparse_moe.experts.{}.w2",
    }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return super().write(config) | {"intermediate_size": config.expert_dim}

    def read(self, theirs: Fields) -> dict[str, Any]:
        if "num_experts" in theirs:
            theirs.setdefault("num_local_experts", theirs.pop("num_experts"))
        return super().read(theirs)
