"""Every model preset composes, is legal, and is the model it is named after."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.flops import parameters
from models.huggingface import config_from_huggingface, config_to_huggingface
from models.roles import Role, parameter_roles
from tests.ranks import run_ranks
from training.check import check
from training.compose import compose
from training.resolve import World, resolve

pytestmark = pytest.mark.torch211

PRESETS = sorted(path.stem for path in (Path(__file__).parent.parent / "configs" / "model").glob("*.yaml"))

# Parameters of the published checkpoints, a tied head counted once: gpt2, gpt2-medium, gpt2-large and gpt2-xl; of the
# others a half of total_size in model.safetensors.index.json, or the sizes in the file's own header.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_350m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "qwen3_moe_30b_a3b": 30_532_122_624,
    "olmo2_1b": 1_484_916_736,
    "mixtral_8x7b": 46_702_792_704,
}

# config.json of meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B, allenai/OLMo-2-0425-1B and
# mistralai/Mixtral-8x7B-v0.1, without the numbers of special tokens; below what differs in the others.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2 = {"tie_word_embeddings": True, "rope_scaling": {**LLAMA_8B["rope_scaling"], "factor": 32.0}}
QWEN_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3_1b": LLAMA_8B
    | LLAMA_3_2
    | {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama3_3b": LLAMA_8B
    | LLAMA_3_2
    | {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
    },
    "llama3_8b": LLAMA_8B,
    "llama3_70b": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "llama3_405b": LLAMA_8B
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126},
    "qwen3_0.6b": QWEN_8B
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3_1.7b": QWEN_8B
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3_8b": QWEN_8B,
    "qwen3_32b": QWEN_8B
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
    "qwen3_moe_30b_a3b": QWEN_8B
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
    },
    "olmo2_1b": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0",
        "use_cache": True,
        "vocab_size": 100352,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
}
# Fields that are not the model's: of tokens, files, and the auxiliary loss, which training of ours has itself.
NOT_OURS = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version", "router_aux_loss_coef"}


def composed(preset: str) -> ModelConfig:
    config, chosen = compose([f"model={preset}"])
    world = World(ranks=1, ranks_per_host=1)
    resolve(config, world, chosen)
    assert check(config, world) == []
    return config.model


def test_the_published_models_are_there() -> None:
    assert set(PUBLISHED) < set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_builds_on_meta(preset: str) -> None:
    config = composed(preset)
    with torch.device("meta"):
        model = Decoder(config)
    widths = config.dim * (1 if config.tied_head else 2) + config.value_embeddings * config.key_value_dim
    padding = (config.padded_vocab_size - (config.vocab_size or 0)) * widths
    roles = parameter_roles(model)
    built = sum(p.numel() for name, p in model.named_parameters() if roles[name] is not Role.balance)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert built - padding == parameters(config)
    assert parameters(config) == PUBLISHED.get(preset, parameters(config))


def as_they_read(written: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What transformers makes of config.json, with what it derives and its defaults."""
    from transformers import AutoConfig

    found = {}
    for preset, config in written.items():
        read = AutoConfig.for_model(**config)
        found[preset] = {field: value for field, value in read.to_dict().items() if field not in NOT_OURS}
        found[preset]["head_dim"] = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    return found


def test_config_json_is_the_published_one() -> None:
    written = {preset: config_to_huggingface(composed(preset)) for preset in CONFIGS}
    ours, theirs = run_ranks(1, read_both, written, CONFIGS, timeout=120)[0]
    for preset in CONFIGS:
        fields = ours[preset].keys() | theirs[preset].keys()
        assert {field for field in fields if ours[preset].get(field) != theirs[preset].get(field)} == set(), preset


def read_both(*written: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    return [as_they_read(each) for each in written]


@pytest.mark.parametrize("preset", CONFIGS)
def test_the_published_config_json_is_the_preset(preset: str) -> None:
    imported = config_from_huggingface(CONFIGS[preset])
    assert config_to_huggingface(imported) == config_to_huggingface(composed(preset))
    assert parameters(imported) == PUBLISHED[preset]
