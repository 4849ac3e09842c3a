"""A model that remembers says of each token what it says of the whole text."""

from typing import Any

import pytest
import torch

from models.attention import AttentionCore
from models.cache import left_padded, remembering
from models.config import FeedForward, MoE, Norm, NormPlace, Position, QKNorm
from tests.models.build import largest_difference, logits_of, random_decoder, random_tokens, tiny

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "rotary, grouped": {"norm": Norm.rmsnorm, "position": Position.rotary, "ffn": FeedForward.swiglu, "kv_heads": 1},
    "windows": {"position": Position.rotary, "window": 4, "full_every": 2, "qk_norm": QKNorm.all},
    "soft-cap": {"attention_softcap": 3.0, "norm_place": NormPlace.both, "head_dim": 6, "window": 5},
    "streams": {"value_embeddings": 1, "x0": True, "skips": True},
    "experts": {"moe": MoE(experts=4)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_after_the_other(family: str) -> None:
    config = tiny(**FAMILIES[family])
    model = random_decoder(config, dtype=torch.float64).eval()
    tokens = random_tokens(config, 2, 12)
    whole = logits_of(model, tokens)
    found = []
    with remembering(model, torch.zeros(2, 14, dtype=torch.long)) as cache:
        places = torch.arange(12).expand(2, -1)
        for first, end in [(0, 5), (5, 6), (6, 9), (9, 12)]:
            found.append(logits_of(model, tokens[:, first:end], positions=places[:, first:end]))
            cache.filled = end
    assert largest_difference(torch.cat(found, dim=1), whole) < 1e-12
    assert any(isinstance(module, AttentionCore) for module in model.modules())
    assert torch.equal(logits_of(model, tokens), whole)  # and forgets


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_seen_by_none(family: str) -> None:
    """Prompts of several lengths side by side, each as if alone; what is not kept is overwritten."""
    config = tiny(**FAMILIES[family])
    model = random_decoder(config, dtype=torch.float64).eval()
    prompts = [random_tokens(config, 1, length, seed=length)[0].tolist() for length in (1, 7, 4)]
    tokens, positions, documents = left_padded(prompts, 8, 12, CPU)
    with remembering(model, documents) as cache:
        first = logits_of(model, tokens, positions=positions)[:, -1]
        cache.filled = 8
        more = torch.tensor([[3, 60], [4, 61], [5, 62]])  # the second of each is a filler
        second = logits_of(model, more, positions=positions[:, -1:] + torch.tensor([1, 2]))[:, 0]
        cache.filled = 9
        third = logits_of(model, more[:, :1] + 3, positions=positions[:, -1:] + 2)[:, 0]
    for row, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, 3 + row, 6 + row]])
        alone = logits_of(model, text)[0, -3:]
        assert largest_difference(torch.stack([first[row], second[row], third[row]]), alone) < 1e-12
