"""A real trained GPT-2-shaped model with all activations of one input (llm-viz's gpt-nano-sort, MIT)."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.decoder import Decoder
from models.flops import parameters
from models.huggingface import state_from_huggingface
from tests.models.build import largest_difference, logits_of
from tests.ranks import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "oracles" / "gpt_nano_sort"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="../shared/data/oracles/gpt_nano_sort is not here")


def read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file of float32 in base64."""
    content: dict[str, Any] = json.loads(path.read_text())
    del content["config"]
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(value["data"])), dtype=torch.float32).reshape(value["shape"])
        for name, value in content.items()
    }


@pytest.fixture(scope="module")
def model() -> Any:
    config = ModelConfig(layers=3, heads=3, dim=48, context=11, vocab_size=3, tied_head=False)
    theirs = read(FOLDER / "gpt-nano-sort-model.json")
    for name in theirs:
        if ".c_" in name and name.endswith("weight"):
            theirs[name] = theirs[name].T  # stored as Linear has it, GPT-2's files have Conv1D's
    decoder = Decoder(config)
    decoder.load_state_dict(state_from_huggingface(config, theirs))
    return decoder.eval()


def test_parameters(model: Any) -> None:
    theirs = read(FOLDER / "gpt-nano-sort-model.json")
    masks = 3 * 11 * 11
    assert parameters(model.config) == sum(value.numel() for value in theirs.values()) - masks == 85_728


def test_every_activation(model: Any) -> None:
    theirs = read(FOLDER / "gpt-nano-sort-t0-partials.json")
    found: dict[str, Tensor] = {}
    first = model.blocks["0"]
    watched = {
        "tok_emb": model.embed.tokens,
        "pos_emb": model.embed.positions,
        "x": model.embed,
        "ln1": first.attention_norm,
        "yProj": first.attention.out,
        "ln2": first.feedforward_norm,
        "fc": first.feedforward.up,
        "mlp": first.feedforward.down,
        "block0": first,
        "block1": model.blocks["1"],
        "block2": model.blocks["2"],
        "ln_f": model.norm,
    }

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor]) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_inputs(*names: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.update(zip(names, inputs, strict=False))

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
    hooks += [
        first.attention.core.register_forward_pre_hook(keep_inputs("q", "k", "v")),
        first.attention.out.register_forward_pre_hook(keep_inputs("y")),
        first.feedforward.down.register_forward_pre_hook(keep_inputs("gelu")),
        first.feedforward_norm.register_forward_pre_hook(keep_inputs("attnResid")),
    ]
    tokens = theirs["idx"].long()
    found["lm_head"] = logits_of(model, tokens)
    found["probs"] = found["lm_head"].softmax(-1)
    for hook in hooks:
        hook.remove()

    thirds = (found[part].transpose(1, 2).flatten(2) for part in ("q", "k", "v"))
    found["qkv"] = torch.cat(list(thirds), -1)
    found["mlpResid"] = found["block0"]
    not_kept = {"idx", "att", "attSm"}  # the fused kernel has no scores
    assert set(found) == set(theirs) - not_kept
    for name, value in found.items():
        expected = theirs[name].expand_as(value) if name != "pos_emb" else theirs[name].reshape(value.shape)
        assert largest_difference(value, expected) <= 1e-5, name


def test_it_sorts(model: Any) -> None:
    """Six digits in, the same sorted out: the task it was trained for."""
    digits = torch.tensor([[2, 0, 1, 2, 1, 0], [1, 1, 1, 0, 0, 2], [2, 2, 2, 2, 0, 1]])
    sequence = digits
    for _ in range(6):
        sequence = torch.cat([sequence, logits_of(model, sequence[:, -11:])[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(sequence[:, 6:], digits.sort(dim=1).values)
