"""Every model preset composes, is legal, and is the model it is named after."""

from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.flops import parameters
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
    imported = config_from_huggingface(CONFIGS[preset])
    assert config_to_huggingface(imported) == config_to_huggingface(composed(preset))
