"""Every model preset composes, is legal, and is the model it is named after."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.flops import active_parameters, parameters
from models.huggingface import config_from_huggingface, config_to_huggingface
from models.roles import Role, parameter_roles
from tests.models.published import CONFIGS, ONLY_CONVERTED, PARAMETERS
from training.check import check
from training.compose import compose
from training.resolve import World, resolve

pytestmark = pytest.mark.torch211

PRESETS = sorted(path.stem for path in (Path(__file__).parent.parent / "configs" / "model").glob("*.yaml"))


def composed(preset: str) -> ModelConfig:
    config, chosen = compose([f"model={preset}"])
    world = World(ranks=1, ranks_per_host=1)
    resolve(config, world, chosen)
    assert check(config, world) == []
    return config.model


def test_the_published_models_are_there() -> None:
    named = {"gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m"} | CONFIGS.keys() - ONLY_CONVERTED
    assert named < set(PRESETS)
    assert named == PARAMETERS.keys() - ONLY_CONVERTED


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
    assert parameters(config) == PARAMETERS.get(preset, parameters(config))


@pytest.mark.parametrize("preset", sorted(CONFIGS.keys() & set(PRESETS)))
def test_the_published_config_json_is_the_preset(preset: str) -> None:
    imported, config = config_from_huggingface(CONFIGS[preset]), composed(preset)
    if preset == "deepseek_v3":
        config.init_std = imported.init_std  # the report has another
    assert config_to_huggingface(imported) == config_to_huggingface(config)


def test_deepseek_v3_is_as_large_as_published() -> None:
    """Its file README_WEIGHTS: 36.7B active, without the table 0.9B less. DeepSeek-V2-Lite: 15.7B, 2.4B without it."""
    large, small = composed("deepseek_v3"), composed("deepseek_v3_16b")
    assert parameters(small) == 15_706_484_224
    found = [(active_parameters(config) - config.dim * (config.vocab_size or 0)) / 1e9 for config in (large, small)]
    assert found == [pytest.approx(36.7, abs=0.1), pytest.approx(2.4, abs=0.1)]
    further = parameters(replace(large, mtp=1)) - parameters(large)
    assert further / 1e9 == pytest.approx(11.5, abs=0.15)
