"""What later blocks take of earlier ones, against what must and must not have an effect."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from tests.models.build import logits_of, random_decoder, random_tokens, tiny


def with_mix(model: Decoder, name: str, value: float) -> Decoder:
    """With every number of this name at a value."""
    found = [parameter for own, parameter in model.named_parameters() if own.rpartition(".")[2] == name]
    assert found
    for parameter in found:
        torch.nn.init.constant_(parameter, value)
    return model


@pytest.mark.parametrize("layers", [1, 2, 5, 6])
def test_a_model_that_mixes_nothing_in_is_the_plain_one(layers: int) -> None:
    """x times 1, and all else times 0."""
    plain = random_decoder(tiny(layers=layers))
    config = tiny(layers=layers, x0=True, skips=True, value_embeddings=layers // 2)
    mixing = random_decoder(config)
    mixing.load_state_dict(plain.state_dict(), strict=False)
    values = {"x": 1.0, "x0": 0.0} | ({"skip": 0.0, "own": 1.0, "embedding": 0.0} if layers > 1 else {})
    for name, value in values.items():
        with_mix(mixing, name, value)
    tokens = random_tokens(config, 2, 9)
    assert torch.equal(logits_of(mixing, tokens), logits_of(plain, tokens))


@pytest.mark.parametrize(
    ("layers", "sources"), [(1, {}), (2, {1: 0}), (3, {2: 0}), (5, {3: 1, 4: 0}), (6, {3: 2, 4: 1, 5: 0})]
)
def test_a_skip_ends_where_it_should(layers: int, sources: dict[int, int]) -> None:
    """What each block is given, and what the blocks gave."""
    model: Any = random_decoder(tiny(layers=layers, skips=True))
    taken: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}

    def watch(layer: int, block: Any) -> None:
        def record(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            given[layer] = output
            taken.update({layer: inputs[1]} if len(inputs) > 1 else {})

        block.register_forward_hook(record)

    for name, block in model.blocks.items():
        watch(int(name), block)
    logits_of(model, random_tokens(model.config, 1, 5))
    assert {layer: source for layer, tensor in taken.items() for source in given if given[source] is tensor} == sources


def test_tensors_of_the_stream() -> None:
    """Of 5 layers the first two leave a skip and the last two take it."""
    assert [ModelConfig(layers=5, skips=True).stream_tensors(layer) for layer in range(5)] == [1, 2, 3, 3, 2]
    assert [ModelConfig(layers=4, skips=True, x0=True).stream_tensors(layer) for layer in range(4)] == [2, 3, 4, 3]
    assert [ModelConfig(layers=3).stream_tensors(layer) for layer in range(3)] == [1, 1, 1]


def test_a_table_serves_a_block_of_each_end() -> None:
    config = tiny(layers=5, value_embeddings=2)
    assert [config.value_table(layer) for layer in range(5)] == [0, 1, None, 0, 1]
    model: Any = random_decoder(config)
    assert model.values["3"].table.weight is model.values["0"].table.weight
    assert model.values["4"].table.weight is not model.values["0"].table.weight


def test_a_value_depends_on_its_own_token_only() -> None:
    """Attention from the last token to itself alone: the vectors of another token do not reach it."""
    config = tiny(layers=2, value_embeddings=1, kv_heads=1)
    model: Any = random_decoder(config)
    tokens = torch.tensor([[5, 6, 7]])
    documents = torch.tensor([[0, 1, 2]])
    before = logits_of(model, tokens, documents=documents)
    with torch.no_grad():
        model.values["0"].table.weight[6] += 1
    changed = (logits_of(model, tokens, documents=documents) != before).any(-1)
    assert changed.tolist() == [[False, True, False]]
