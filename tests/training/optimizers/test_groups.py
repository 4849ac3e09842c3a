"""Which parameters decay: all of them accounted for."""

import pytest
import torch

from models.config import ModelConfig, MoE
from models.decoder import Decoder
from tests.models.build import tiny
from training.optimizers.groups import decay_groups


def test_groups_of_gpt2_124m() -> None:
    """As build-nanogpt prints them for a vocabulary padded to 50304."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(layers=12, heads=12, dim=768, context=1024, vocab_size=50257))
    decayed, rest = decay_groups(model, 0.1)
    assert str(decayed) == "50 tensors, 124,354,560 values, weight decay 0.1"
    assert str(rest) == "98 tensors, 121,344 values, weight decay 0"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_in_one_group(tied: bool, bias: bool) -> None:
    model = Decoder(tiny(tied_head=tied, bias=bias))
    decayed, rest = decay_groups(model, 0.3)
    assert not set(decayed.parameters) & set(rest.parameters)
    named = dict(model.named_parameters())
    assert decayed.parameters | rest.parameters == named
    assert {name for name, p in named.items() if p.dim() >= 2} == set(decayed.parameters)
    assert (decayed.weight_decay, rest.weight_decay) == (0.3, 0.0)


def test_what_routers_count_is_in_no_group() -> None:
    decayed, rest = decay_groups(Decoder(tiny(layers=1, moe=MoE(experts=4))), 0.3)
    kept = {name.removeprefix("blocks.0.feedforward.") for name in decayed.parameters if "feedforward." in name}
    assert kept == {"router.weight", "experts.up", "experts.down"}
    assert not any("router" in name for name in rest.parameters)
