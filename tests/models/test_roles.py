"""Every parameter has a role, stated where it is made."""

import pytest
import torch
from torch import nn

from models.decoder import Decoder
from models.roles import Role, parameter_roles, parameter_specs
from tests.models.build import tiny

BLOCK = {
    "attention_norm": Role.norm,
    "attention.qkv": Role.matrix,
    "attention.out": Role.matrix,
    "feedforward_norm": Role.norm,
    "feedforward.up": Role.matrix,
    "feedforward.down": Role.matrix,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_roles_of_gpt2(tied: bool, bias: bool) -> None:
    expected = {"embed.tokens.weight": Role.embedding, "embed.positions.weight": Role.embedding}
    modules = {f"blocks.{layer}.{name}": role for layer in range(2) for name, role in BLOCK.items()} | {
        "norm": Role.norm
    }
    for name, role in modules.items():
        expected[f"{name}.weight"] = role
        if bias:
            expected[f"{name}.bias"] = Role.bias
    if not tied:
        expected["head.weight"] = Role.head
    assert parameter_roles(Decoder(tiny(tied_head=tied, bias=bias))) == expected


def test_only_the_vocabulary_is_padded() -> None:
    specs = parameter_specs(Decoder(tiny(tied_head=False)))
    padded = {name: spec.rows for name, spec in specs.items() if spec.rows is not None}
    assert padded == {"embed.tokens.weight": 67, "head.weight": 67}


def test_a_parameter_without_a_role_is_named() -> None:
    model = Decoder(tiny())
    model.blocks["1"].attention.gate = nn.Linear(4, 4)  # type: ignore[union-attr]
    with pytest.raises(LookupError, match=r"blocks\.1\.attention\.gate\.weight of Linear"):
        parameter_roles(model)
    model = Decoder(tiny())
    model.blocks["0"].register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(LookupError, match=r"blocks\.0\.scale of Block"):
        parameter_roles(model)
