"""The shapes that plans are made of are those of the model."""

from dataclasses import replace

import pytest
import torch

from models.config import Latent, ModelConfig, MoE, Norm, Position
from models.decoder import Decoder
from models.shapes import parameter_shapes

SMALL = ModelConfig(layers=2, dim=24, heads=4, vocab_size=67, context=9)
MODERN = replace(SMALL, position=Position.rotary, norm=Norm.rmsnorm, qkv_bias=True)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, tied_head=False, bias=False, vocab_multiple=1),
        replace(SMALL, kv_heads=2, ffn_dim=34),
        replace(SMALL, kv_heads=1, fused_qkv=False),
        replace(SMALL, layers=5, x0=True, kv_heads=2),
        replace(SMALL, layers=5, skips=True, bias=False, value_embeddings=2),
        replace(SMALL, moe=MoE(experts=5, dense_layers=1, shared=2, dim=14)),
        replace(SMALL, bias=False, moe=MoE(experts=3, capacity_factor=1.0)),
        replace(SMALL, position=Position.rotary, latent=Latent(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5)),
        replace(MODERN, latent=Latent(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5)),
        replace(MODERN, mtp=2, moe=MoE(experts=6, dense_layers=1, shared=1, groups=3)),
        replace(MODERN, mtp=1, tied_head=False, norm=Norm.layernorm),
    ],
    ids=str,
)
def test_every_parameter_in_the_models_order(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert list(parameter_shapes(config).items()) == found
