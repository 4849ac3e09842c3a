"""Small models whose every value matters."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.decoder import Decoder
from models.moe import routers

TINY: dict[str, Any] = {"layers": 2, "dim": 24, "heads": 3, "context": 16, "vocab_size": 67, "vocab_multiple": 32}


def tiny(**changes: Any) -> ModelConfig:
    """Nothing in it is a power of two that should not matter: three heads, a vocabulary of 67 rows padded to 96."""
    return ModelConfig(**(TINY | changes))


def random_decoder(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Every parameter is random, biases, norms and padding too, and so large that logits are of order 1."""
    with torch.device("meta"):
        model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        fan_in = parameter.shape[-1] if parameter.dim() >= 2 else 10
        values = torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in)
        if "norm.weight" in name:
            values += 1.0
        path, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(path), own_name, nn.Parameter(values.to(dtype), parameter.requires_grad))
    for router in routers(model):
        router.share = torch.tensor(1.0, dtype=dtype)
    model.tie()
    return model


def random_tokens(config: ModelConfig, batch: int, seq: int, seed: int = 1) -> Tensor:
    """[batch, seq] of the vocabulary."""
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Decoder, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """[batch, seq, vocabulary], without a graph."""
    with torch.no_grad():
        logits = model(tokens=tokens, **inputs)
    assert isinstance(logits, Tensor)
    return logits


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Infinite where one is not finite, so that it is never within a tolerance."""
    assert found.shape == expected.shape
    return (found - expected).abs().nan_to_num(nan=math.inf).max().item()
