"""The prediction of further tokens against a restatement of DeepSeek-V3, 2.2, token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import Latent, ModelConfig, MoE, Norm, Position, Score
from models.decoder import Decoder
from models.head import IGNORED
from models.multitoken import later
from tests.models.build import largest_difference, random_decoder, random_tokens, tiny

pytestmark = pytest.mark.torch211

SEQ, WEIGHT = 9, 0.4


def config(**changes: Any) -> ModelConfig:
    own = {"layers": 2, "mtp": 2, "mtp_weight": WEIGHT, "position": Position.rotary, "norm": Norm.rmsnorm}
    return tiny(**(own | {"bias": False, "tied_head": False} | changes))


def stream_of(model: Decoder, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """What the head is given. The blocks themselves have tests of their own."""
    assert model.embed is not None and model.norm is not None
    x = model.embed(tokens, None)
    for block in model.blocks.values():
        x = block(x, positions=None, documents=documents, values=None)
    found: Tensor = model.norm(x)
    return found


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def restated(model: Decoder, tokens: Tensor, labels: Tensor, documents: Tensor | None) -> Tensor:
    """The sum of losses of further tokens. Step k of token i joins the stream with token i + k and predicts the label
    of token i + k."""
    table, head = model.get_parameter("embed.tokens.weight"), model.get_parameter("head.weight")
    x, total = stream_of(model, tokens, documents), torch.zeros((), dtype=torch.float64)
    for step in range(model.config.mtp):
        ahead = step + 1
        name = f"mtp.steps.{step}"
        weights = {part: model.get_parameter(f"{name}.{part}.weight") for part in ("token_norm", "stream_norm", "join")}
        joined = []
        for place in range(SEQ):
            next_token = tokens[:, place + ahead] if place + ahead < SEQ else torch.zeros_like(tokens[:, 0])
            both = [norm(table[next_token], weights["token_norm"]), norm(x[:, place], weights["stream_norm"])]
            joined.append(torch.cat(both, dim=-1) @ weights["join"].T)
        block = model.get_submodule(f"{name}.block")
        x = block(torch.stack(joined, dim=1), positions=None, documents=documents, values=None)
        x = norm(x, model.get_parameter(f"{name}.norm.weight"))
        for row in range(len(tokens)):
            for place in range(SEQ - ahead):
                apart = documents is not None and documents[row, place] != documents[row, place + ahead]
                if labels[row, place + ahead] != IGNORED and not apart:
                    scores = head[:67] @ x[row, place]
                    total = total + F.cross_entropy(scores, labels[row, place + ahead])
    return total


CASES = {
    "untied": config(),
    "tied": config(tied_head=True, mtp=1),
    "deepseek": config(
        latent=Latent(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5),
        moe=MoE(experts=4, dim=16, shared=1, dense_layers=1, score=Score.sigmoid),
    ),
}


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 3 + [1] * 6, [0] * 8 + [1]])], ids=["one", "two"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_has_their_mean(name: str, documents: Tensor | None) -> None:
    model = random_decoder(CASES[name], dtype=torch.float64)
    tokens = random_tokens(model.config, 2, SEQ)
    labels = torch.cat([tokens[:, 1:], random_tokens(model.config, 2, 1, seed=3)], dim=1)
    labels[0, 4] = labels[1, 6] = IGNORED
    inputs = {"tokens": tokens, "labels": labels, "documents": documents}
    loss = model(**inputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    model.eval()
    plain = model(**inputs)
    assert isinstance(plain, Tensor)
    assert loss.item() == plain.item()  # what is shown is without them
    model.train()
    (plain.sum() + WEIGHT / model.config.mtp * restated(model, tokens, labels, documents)).backward()
    assert found.keys() > {"mtp.steps.0.join.weight", "mtp.steps.0.norm.weight"}
    for parameter, value in model.named_parameters():
        if parameter in found and ".router.load" not in parameter:
            assert value.grad is not None
            assert largest_difference(found[parameter], value.grad) < 1e-10, parameter


def test_a_model_that_is_asked_for_logits_predicts_the_next_token_alone() -> None:
    more, one = random_decoder(config()), random_decoder(config(mtp=0))
    one.load_state_dict({name: value for name, value in more.state_dict().items() if not name.startswith("mtp.")})
    tokens = random_tokens(more.config, 2, SEQ)
    with torch.no_grad():
        assert torch.equal(more(tokens=tokens), one(tokens=tokens))
        none = {"tokens": tokens, "labels": tokens, "reduction": "none"}
        assert torch.equal(more.eval()(**none), one.eval()(**none))


@pytest.mark.parametrize("number", [1, 3, 4, 7])
def test_later(number: int) -> None:
    values = torch.arange(1, 5).expand(2, 4)
    expected = [*range(1 + number, 5), *[-9] * min(number, 4)]
    assert later(values, number, -9).tolist() == [expected, expected]
