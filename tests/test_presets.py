"""Every model preset composes, is legal, and is the model it is named after."""

from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.flops import parameters
from models.roles import Role, parameter_roles
from training.check import check
from training.compose import compose
from training.resolve import World, resolve

pytestmark = pytest.mark.torch211

PRESETS = sorted(path.stem for path in (Path(__file__).parent.parent / "configs" / "model").glob("*.yaml"))

# Parameters of the published checkpoints gpt2, gpt2-medium, gpt2-large and gpt2-xl, the tied head counted once.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_350m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
}


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
