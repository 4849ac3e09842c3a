"""Drawn tokens, with transformers as the oracle. Greedy ones are in test_greedy."""

from typing import Any

import pytest
import torch

from models.decoder import Decoder
from parallel.config import ParallelConfig, Strategy
from parallel.mesh import build_mesh
from parallel.tensor import cut_tensors
from tests.models.build import random_decoder, tiny
from tests.ranks import run_ranks
from training.writing import Sampling, shares, write

CPU = torch.device("cpu")
NEVER = 1000  # a token that is not in the vocabulary


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 1.0])
def test_shares(temperature: float, top_k: int | None, top_p: float | None) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    expected: Any = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p is not None and top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    found = shares(logits[0], Sampling(temperature, top_k, top_p))
    assert torch.allclose(found, expected[0].softmax(-1), atol=1e-12)


def test_the_lowest_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert shares(logits, Sampling(temperature=1e-320)).tolist() == [0.0, 1.0, 0.0]


def test_a_prompt_does_not_depend_on_the_others() -> None:
    model = random_decoder(tiny(context=64), dtype=torch.float64).eval()
    together = write(model, model, [[1, 2, 3], [4]], 20, Sampling(), 5, NEVER, CPU)
    assert together[0] == write(model, model, [[1, 2, 3]], 20, Sampling(), 5, NEVER, CPU)[0]
    assert together[0] != write(model, model, [[1, 2, 3]], 20, Sampling(), 6, NEVER, CPU)[0]
    assert together[1] == write(model, model, [[9] * 30, [4]], 20, Sampling(), 5, NEVER, CPU)[1]


def test_a_text_ends_where_its_end_is_drawn() -> None:
    model = random_decoder(tiny(context=64), dtype=torch.float64).eval()
    whole = write(model, model, [[1], [4]], 30, Sampling(), 2, NEVER, CPU)
    end = whole[0][9]
    cut = write(model, model, [[1], [4]], 30, Sampling(), 2, end, CPU)
    for text, of in zip(cut, whole, strict=True):
        assert text == (of[: of.index(end)] if end in of else of)


def written_over_ranks(prompts: list[list[int]]) -> list[list[int]]:
    config = tiny(heads=4, dim=32, kv_heads=2, context=64)
    model = random_decoder(config, dtype=torch.float64).eval()
    with torch.device("meta"):
        cut = Decoder(config).to(torch.float64)
    mesh = build_mesh(ParallelConfig(Strategy.single, tp=2), CPU)["tp"]
    cut_tensors(cut, mesh)
    cut.to_empty(device="cpu")
    cut.tie()
    from torch.distributed.tensor import distribute_tensor

    whole = model.state_dict()
    with torch.no_grad():
        for name, parameter in cut.named_parameters():
            of_ranks: Any = parameter
            of_ranks.copy_(distribute_tensor(whole[name], mesh, of_ranks.placements, src_data_rank=None))
    cut.eval()
    return write(cut, cut, prompts, 30, Sampling(), 3, NEVER, CPU, parts=2)


def test_ranks_that_share_heads_write_the_same() -> None:
    prompts = [[5, 6, 7], [8], [1, 2, 3, 4, 5, 6]]
    config = tiny(heads=4, dim=32, kv_heads=2, context=64)
    model = random_decoder(config, dtype=torch.float64).eval()
    alone = write(model, model, prompts, 30, Sampling(), 3, NEVER, CPU)
    assert run_ranks(2, written_over_ranks, prompts, group=True) == [alone, alone]
