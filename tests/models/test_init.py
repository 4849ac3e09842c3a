"""First values: the same whoever draws them, of the stated size, and none drawn twice."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from models.decoder import Decoder
from models.derive import derive
from models.init import initial_rows
from models.roles import Role, Spec
from parallel.materialize import materialize
from tests.models.build import random_tokens

CPU = torch.device("cpu")
WEIGHT = Spec(Role.matrix, std=0.02)


def rows(
    spec: Spec, count: int, start: int = 0, stop: int | None = None, seed: int = 0, name: str = "w"
) -> torch.Tensor:
    return initial_rows(spec, name, torch.Size((count, 3)), seed, CPU, start, stop)


def built(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    materialize(model, seed, CPU)
    return model


def test_each_block_is_one_draw_of_its_own_generator() -> None:
    expected = []
    for block, count in enumerate([1024, 1024, 452]):
        generator = torch.Generator().manual_seed(derive(5, "w", block))
        expected.append(torch.randn(count, 3, generator=generator) * 0.02)
    assert torch.equal(rows(WEIGHT, 2500, seed=5), torch.cat(expected))


def test_an_expert_is_a_block() -> None:
    shape = torch.Size((5, 3, 2))
    whole = initial_rows(WEIGHT, "w", shape, 5, CPU)
    for expert in range(5):
        generator = torch.Generator().manual_seed(derive(5, "w", expert))
        assert torch.equal(whole[expert], torch.randn(3, 2, generator=generator) * 0.02)
        assert torch.equal(initial_rows(WEIGHT, "w", shape, 5, CPU, expert, expert + 1), whole[expert : expert + 1])


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([1, 1000, 1024, 1025, 2500]), st.booleans())
def test_any_range_of_rows_is_drawn_alone(data: st.DataObject, count: int, padded: bool) -> None:
    spec = Spec(Role.embedding, std=0.02, rows=max(count - 700, 1)) if padded else WEIGHT
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert torch.equal(rows(spec, count, start, stop), rows(spec, count)[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(288, 384), (257, 384), (300, 301), (383, 384), (257, 257), (1100, 1200)])
def test_a_rank_may_hold_padding_only(start: int, stop: int) -> None:
    """257 bytes padded to 384 over four ranks: the last has rows 288 to 383."""
    spec = Spec(Role.embedding, std=0.02, rows=257)
    assert torch.equal(rows(spec, 1200, start, stop), torch.zeros(stop - start, 3))


@pytest.mark.parametrize("vocabulary", [67, 1024, 1030])
def test_padding_is_zero_and_changes_no_value(vocabulary: int) -> None:
    spec = Spec(Role.embedding, std=0.02, rows=vocabulary)
    exact = rows(spec, vocabulary)
    for padded in (vocabulary + 1, vocabulary + 61, vocabulary + 2000):
        values = rows(spec, padded)
        assert torch.equal(values[:vocabulary], exact)
        assert not values[vocabulary:].any()


def test_values_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = rows(WEIGHT, 64)
    torch.manual_seed(2)
    assert torch.equal(rows(WEIGHT, 64), first)
    assert not torch.equal(rows(WEIGHT, 64, seed=1), first)
    assert not torch.equal(rows(WEIGHT, 64, name="v"), first)


def test_constants() -> None:
    assert torch.equal(rows(Spec(Role.norm, mean=1.0), 5), torch.ones(5, 3))
    assert torch.equal(rows(Spec(Role.bias), 5), torch.zeros(5, 3))


@pytest.mark.parametrize("tied", [True, False])
def test_standard_deviations_of_gpt2(tied: bool) -> None:
    """0.02, but 0.02 / sqrt(2 layers) for what is added to the residual stream; biases 0, norms 1."""
    config = ModelConfig(layers=3, dim=128, heads=4, context=128, vocab_size=257, tied_head=tied)
    model = built(config)
    expected = {"out.weight": 0.02 / math.sqrt(6), "down.weight": 0.02 / math.sqrt(6)}
    weights = 0
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            weights += 1
            values = parameter[:257] if name in ("embed.tokens.weight", "head.weight") else parameter
            std = expected.get(".".join(name.split(".")[-2:]), 0.02)
            assert values.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(values.mean().item()) < 4 * std / math.sqrt(values.numel()), name
    assert weights == 2 + 3 * 4 + (not tied)


def test_no_two_parameters_are_alike() -> None:
    model = built(ModelConfig(layers=3, dim=64, heads=4, context=64, vocab_size=64, tied_head=False))
    weights = {name: p.detach().flatten()[:64] for name, p in model.named_parameters() if p.dim() == 2}
    correlations = torch.corrcoef(torch.stack(list(weights.values())))
    assert (correlations - torch.eye(len(weights))).abs().max() < 0.6


def test_padding_of_the_vocabulary_changes_no_weight() -> None:
    shape = {"layers": 1, "dim": 24, "heads": 3, "context": 16, "vocab_size": 67, "tied_head": False}
    states = [built(ModelConfig(**shape, vocab_multiple=multiple)).state_dict() for multiple in (1, 64, 2048)]  # type: ignore[arg-type]
    assert [state["head.weight"].shape[0] for state in states] == [67, 128, 2048]
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name][: value.shape[0]], value), name
            assert not state[name][value.shape[0] :].any(), name


def test_float64_has_the_same_values() -> None:
    config = ModelConfig(layers=1, dim=24, heads=3, context=16, vocab_size=67)
    exact = built(config, dtype=torch.float64).state_dict()
    for name, value in built(config).state_dict().items():
        assert exact[name].dtype is torch.float64
        assert torch.equal(exact[name], value.double()), name


def test_a_tied_head_is_one_parameter() -> None:
    model: Any = built(ModelConfig(layers=1, dim=24, heads=3, context=16, vocab_size=67))
    assert model.head.weight is model.embed.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_first_loss(tied: bool) -> None:
    """A normalized x has length sqrt(dim), so logits are normal with variance dim x std^2 and the expected loss is
    ln(vocabulary) + dim x std^2 / 2 (10.98 for GPT-2 124M; 8.47 here)."""
    config = ModelConfig(layers=2, dim=384, heads=6, context=128, vocab_size=4100, tied_head=tied)
    tokens, labels = random_tokens(config, 16, 128, seed=1), random_tokens(config, 16, 128, seed=2)
    with torch.no_grad():
        loss = built(config)(tokens=tokens, labels=labels) / labels.numel()
    assert loss.item() == pytest.approx(math.log(4100) + 384 * 0.02**2 / 2, abs=0.05)
