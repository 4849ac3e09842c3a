"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024), and Mistral 7B (Jiang et al. 2023)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FeedForward, ModelConfig, Norm, Position, Residual
from models.families.family import Family, Fields, Piece, grouped, same, stacked
from models.families.rope import rope_from, rope_to

ENDS = {"embed.tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
BEFORE = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
PROJECTIONS = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
QKV = ("attention.q", "attention.k", "attention.v")


class Plain(Family):
    """What Llama and those after it share."""

    keys: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "context": "max_position_embeddings",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "norm_eps": "rms_norm_eps",
        "init_std": "initializer_range",
        "tied_head": "tie_word_embeddings",
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "norm": Norm.rmsnorm,
        "ffn": FeedForward.swiglu,
        "position": Position.rotary,
        "bias": False,
        "fused_qkv": False,
        "init_residual": Residual.same,
    }
    meant: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0.0}
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    prefix = "model."
    token_table = "model.embed_tokens.weight"
    buffers: ClassVar[tuple[str, ...]] = (".rotary_emb.inv_freq",)
    theta: ClassVar[float] = 10_000.0  # where config.json leaves it out
    heads_divide: ClassVar[bool] = False  # transformers wants heads to divide the width, though head_dim is given
    names: ClassVar[Mapping[str, str]] = BEFORE | PROJECTIONS  # of parts of a block
    experts: ClassVar[Mapping[str, str]] = {}  # matrices of an expert; {} is its number

    def obstacles(self, config: ModelConfig) -> list[str]:
        refused = self.heads_divide and config.dim % config.heads != 0
        return super().obstacles(config) + ([f"model.heads={config.heads}"] if refused else [])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        # Their own numbers of special tokens, where none are given, are of one tokenizer.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        sizes = {"num_key_value_heads": config.key_value_heads, "head_dim": config.head_size}
        return sizes | {"intermediate_size": config.feedforward_dim} | rope_to(config) | tokens

    def read(self, theirs: Fields) -> dict[str, Any]:
        sizes = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn_dim": "intermediate_size"}
        return {key: theirs.take(field) for key, field in sizes.items()} | rope_from(theirs, self.theta)

    def piece(self, config: ModelConfig, name: str) -> Piece | None:
        path, _, kind = name.rpartition(".")
        if path in ENDS:
            return same(name, f"{ENDS[path]}.{kind}")
        _, layer, inner = path.split(".", 2)
        block = f"model.layers.{layer}"
        if inner == "attention.qkv":
            return grouped(config, name, [f"{block}.{self.names[part]}.{kind}" for part in QKV])
        if inner == "feedforward.experts" and self.experts:
            numbers = range(config.moe.experts)
            return stacked(name, [f"{block}.{self.experts[kind].format(number)}.weight" for number in numbers])
        if inner == "feedforward.router" and kind != "weight":
            return None
        return same(name, f"{block}.{self.names[inner]}.{kind}") if inner in self.names else None


class Llama(Plain):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    heads_divide = True

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return super().write(config) | {"attention_bias": config.bias, "mlp_bias": config.bias}

    def read(self, theirs: Fields) -> dict[str, Any]:
        attention, feedforward = theirs.pop("attention_bias", False), theirs.pop("mlp_bias", False)
        if attention != feedforward:
            raise ValueError(f"attention_bias={attention} and mlp_bias={feedforward}; model.bias is one for both")
        return super().read(theirs) | {"bias": attention}


class Mistral(Plain):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {**Plain.keys, "window": "sliding_window"}
    defaults: ClassVar[Mapping[str, Any]] = {**Plain.defaults, "num_key_value_heads": 8, "sliding_window": 4096}
