"""GPT-2 to and from transformers, whose model is the oracle."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    state_from_huggingface,
    state_to_huggingface,
)
from tests.models.build import largest_difference, logits_of, random_decoder, random_tokens, tiny
from tests.ranks import run_ranks

CASES = {
    "tied": tiny(),
    "untied": tiny(tied_head=False),
    "all_square": tiny(ffn_dim=24),  # c_fc and both c_proj load without a transposition too
    "narrow_ffn": tiny(dim=36, heads=3, ffn_dim=20, tied_head=False),
    "one_head": tiny(heads=1, norm_eps=1e-2, context=9),
    "124M": ModelConfig(layers=12, dim=768, heads=12, context=1024, vocab_size=50257),
}


@dataclass
class Compared:
    """What transformers said about one case. Differences are the largest of any logit."""

    to_theirs: float  # our weights in their model
    from_theirs: float  # their weights in our model
    exact: float  # the same in float64
    largest: float  # logit
    unchanged: bool  # theirs -> ours -> theirs is bitwise the same
    losses: tuple[float, float]  # a predicted token's, ours and theirs
    gradients: dict[str, float]  # by their names: the largest difference over the largest number


def randomize(theirs: Any) -> None:
    """transformers begins with biases of 0 and norms of 1, which would hide what is not loaded."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "ln_" in name and name.endswith("weight") else 0.2 * noise)


def relative_gradients(ours: Decoder, theirs: Any) -> dict[str, float]:
    found = {name: value.grad for name, value in ours.named_parameters() if value.grad is not None}
    assert len(found) == len(list(ours.parameters()))
    converted, difference = state_to_huggingface(ours.config, found), {}
    for name, parameter in theirs.named_parameters():
        assert parameter.grad.abs().max() > 1e-4  # or it says nothing
        difference[name] = largest_difference(converted[name], parameter.grad) / parameter.grad.abs().max().item()
    return difference


def compare(config: ModelConfig) -> Compared:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    tokens = random_tokens(config, 2, min(config.context, 16))
    their_config = GPT2Config.from_dict(config_to_huggingface(config))

    ours = random_decoder(config).eval()
    logits = logits_of(ours, tokens)
    with torch.device("meta"):
        theirs: Any = GPT2LMHeadModel(their_config).eval()
    theirs.load_state_dict(state_to_huggingface(config, ours.state_dict()), assign=True)
    theirs.tie_weights()
    said = theirs(tokens, labels=tokens)
    said.loss.backward()
    loss = ours(tokens=tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    gradients = relative_gradients(ours, theirs)
    to_theirs, losses = largest_difference(said.logits, logits), (loss.item(), said.loss.item())
    if config.layers > 4:  # the full size once is enough
        return Compared(to_theirs, 0.0, 0.0, logits.abs().max().item(), True, losses, gradients)

    randomize(theirs)
    config = config_from_huggingface(their_config.to_dict())
    ours = Decoder(config).eval()
    state = state_from_huggingface(config, theirs.state_dict())
    ours.load_state_dict(state | ({"head.weight": state["embed.tokens.weight"]} if config.tied_head else {}))
    with torch.no_grad():
        from_theirs = largest_difference(theirs(tokens).logits, logits_of(ours, tokens))
        back = state_to_huggingface(config, ours.state_dict())
        unchanged = back.keys() == theirs.state_dict().keys() and all(
            torch.equal(back[name], value) for name, value in theirs.state_dict().items()
        )
        exact = largest_difference(theirs.double()(tokens).logits, logits_of(ours.double(), tokens))
    return Compared(to_theirs, from_theirs, exact, logits.abs().max().item(), unchanged, losses, gradients)


def compare_all() -> dict[str, Compared]:
    return {name: compare(config) for name, config in CASES.items()}


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    """In a rank, where what transformers imports is there already."""
    result: dict[str, Compared] = run_ranks(1, compare_all, timeout=300)[0]
    return result


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(compared: dict[str, Compared], name: str) -> None:
    case = compared[name]
    assert case.to_theirs < 1e-4
    assert case.from_theirs < 1e-4
    assert case.exact < 1e-10
    assert case.largest > 0.5


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_theirs(compared: dict[str, Compared], name: str) -> None:
    ours, theirs = compared[name].losses
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_all_gradients_are_theirs(compared: dict[str, Compared], name: str) -> None:
    found = compared[name].gradients
    assert len(found) == 4 + 12 * CASES[name].layers + (not CASES[name].tied_head)
    assert {name: value for name, value in found.items() if not value < 1e-4} == {}


@pytest.mark.parametrize("name", CASES)
def test_the_round_trip_is_bitwise(compared: dict[str, Compared], name: str) -> None:
    assert compared[name].unchanged


@pytest.mark.parametrize("tied", [True, False])
def test_our_round_trip_is_bitwise(tied: bool) -> None:
    """Padding comes back as zeros."""
    config = tiny(tied_head=tied, ffn_dim=24)
    state = random_decoder(config).state_dict()
    back = state_from_huggingface(config, state_to_huggingface(config, state))
    assert set(back) == set(state) - ({"head.weight"} if tied else set())
    for name, value in back.items():
        rows = 67 if name in ("embed.tokens.weight", "head.weight") else value.shape[0]
        assert value.shape == state[name].shape
        assert torch.equal(value[:rows], state[name][:rows]), name
        assert not value[rows:].any(), name


def test_all_that_is_missing_or_too_much_is_named() -> None:
    config = tiny(tied_head=False)
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    missing = ["transformer.h.1.attn.c_proj.bias", "transformer.wpe.weight", "lm_head.weight"]
    for name in missing:
        del theirs[name]
    surplus = ["transformer.h.2.ln_1.weight", "transformer.h.0.attn.rotary"]
    with pytest.raises(ValueError, match=" and have ") as raised:
        state_from_huggingface(config, theirs | {name: torch.ones(24) for name in surplus})
    lack, _, addition = str(raised.value).partition(" and have ")
    assert all(name in lack for name in missing)
    assert all(name in addition for name in surplus)
    assert "c_fc" not in str(raised.value)


@pytest.mark.parametrize("name", ["transformer.h.2.ln_1.weight", "transformer.h.0.attn.rotary"])
def test_weights_of_more_than_the_model_are_refused(name: str) -> None:
    config = tiny()
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    with pytest.raises(ValueError, match=name):
        state_from_huggingface(config, theirs | {name: torch.ones(24)})


@pytest.mark.parametrize("rows", [60, 96, 200])
@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_another_vocabulary_is_refused(rows: int, name: str) -> None:
    """Neither filled up with zeros nor cut."""
    config = tiny(tied_head=False)
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    with pytest.raises(ValueError, match=rf"{name} has {rows} rows.*67"):
        state_from_huggingface(config, theirs | {name: torch.ones(rows, 24)})


def test_names_without_the_prefix_are_understood() -> None:
    """As GPT2Model and OpenAI's own files have them, with the masks older files hold."""
    config = tiny()
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    bare = {name.removeprefix("transformer."): value for name, value in theirs.items() if name != "lm_head.weight"}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    expected = state_from_huggingface(config, theirs)
    found = state_from_huggingface(config, bare)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_config_comes_back() -> None:
    for config in CASES.values():
        back = config_from_huggingface(config_to_huggingface(config))
        back.vocab_multiple = config.vocab_multiple
        assert back == config
    assert config_to_huggingface(tiny(dropout=0.1))["attn_pdrop"] == 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"activation_function": "relu"}, "relu"),
        ({"attn_pdrop": 0.3}, "pdrop"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_what_is_not_our_gpt2_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_from_huggingface(config_to_huggingface(tiny()) | change)


def test_a_model_without_biases_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        config_to_huggingface(tiny(bias=False))
