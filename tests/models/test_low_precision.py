"""parallel.precision.LowPrecision: bf16 computation over float32 masters."""

import pytest
import torch

from parallel.precision import LowPrecision
from tests.models.build import random_decoder, random_tokens, tiny


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_a_bf16_model_computes_and_gives_float32_gradients(tied: bool) -> None:
    config = tiny(tied_head=tied)
    masters, plain = random_decoder(config), random_decoder(config).to(torch.bfloat16)
    before = {name: value.clone() for name, value in masters.state_dict().items()}
    inputs = {"tokens": random_tokens(config, 2, 16), "labels": random_tokens(config, 2, 16, seed=2)}
    loss, expected = LowPrecision(masters, torch.bfloat16)(**inputs), plain(**inputs)
    loss.backward()
    expected.backward()
    assert loss.dtype is torch.float32
    assert torch.equal(loss, expected)
    for name, theirs in plain.named_parameters():
        own = masters.get_parameter(name)
        assert own.grad is not None and theirs.grad is not None
        assert own.dtype is own.grad.dtype is torch.float32
        assert torch.equal(own, before[name]), name
        assert torch.equal(own.grad, theirs.grad.float()), name


def test_micro_batches_are_summed_in_float32() -> None:
    """bf16 would lose a gradient that is 1,000 times smaller than the sum so far."""
    config = tiny()
    masters = random_decoder(config)
    low = LowPrecision(masters, torch.bfloat16)
    tokens, labels = random_tokens(config, 2, 16), random_tokens(config, 2, 16, seed=2)
    alone = []
    for factor in (1.0, 1e-3):
        masters.zero_grad()
        (low(tokens=tokens, labels=labels) * factor).backward()
        alone.append({name: p.grad.clone() for name, p in masters.named_parameters() if p.grad is not None})
    (low(tokens=tokens, labels=labels)).backward()
    for name, parameter in masters.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, alone[1][name] + alone[0][name]), name
        assert not torch.equal(parameter.grad, alone[0][name]), name
