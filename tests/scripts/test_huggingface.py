"""A model of transformers in, our checkpoint out, and back; and what is refused on the way, in sentences."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import FeedForward, MoE, Norm, Position
from models.huggingface import config_to_huggingface, state_to_huggingface
from scripts import export_hf, generate, import_hf
from tests.models.build import random_decoder, tiny
from tests.ranks import run_ranks
from training.files import write_json
from training.refusal import Refusal

LLAMA: dict[str, Any] = {
    "bias": False,
    "norm": Norm.rmsnorm,
    "position": Position.rotary,
    "ffn": FeedForward.swiglu,
    "fused_qkv": False,
    "tied_head": False,
    "vocab_size": 257,
}
WORDS = "tokenizer=bytes hardware.device=cpu"


def save(folder: Path, *, broken: float | None = None, **changes: Any) -> Path:
    config = tiny(**(LLAMA | changes))
    decoder = random_decoder(config)
    with torch.no_grad():
        if config.moe.experts > 0:
            for block in decoder.blocks.values():
                block.get_parameter("feedforward.router.bias").zero_()
        if broken is not None:
            decoder.get_parameter("blocks.1.attention.k.weight").fill_(broken)
    folder.mkdir()
    write_json(folder / "config.json", config_to_huggingface(config))
    save_file(state_to_huggingface(config, decoder.state_dict()), folder / "model.safetensors", {"format": "pt"})
    return folder


def imported(source: Path, words: str) -> Path:
    return import_hf.run(import_hf.parse([str(source), *shlex.split(words)]))


def exported(*words: object) -> None:
    export_hf.run(export_hf.parse([str(word) for word in words]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back_is_bitwise(ranks: int, tmp_path: Path) -> None:
    """From a folder whose name has what a command line reads otherwise."""
    source = save(tmp_path / "it's ${mine}", moe=MoE(experts=4))
    layout = "parallel=fsdp2" if ranks > 1 else ""
    run_ranks(ranks, imported, source, f"{WORDS} name=in out={tmp_path} {layout}")
    exported(tmp_path / "in", tmp_path / "back")
    theirs, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert theirs.keys() == back.keys()
    assert all(torch.equal(theirs[name], back[name]) for name in theirs)


@pytest.mark.parametrize(
    ("broken", "words", "told"),
    [
        (float("nan"), "", "blocks.1.attention.k.weight has values that are not finite"),
        (0.0, "", "blocks.1.attention.k.weight is 0 everywhere"),
        (None, "check_only=true", "instead: check_only=false"),
        (None, "model.dim=64", "instead: model.dim=24"),
    ],
)
def test_imports_that_are_refused(broken: float | None, words: str, told: str, tmp_path: Path) -> None:
    source = save(tmp_path / "theirs", broken=broken)
    with pytest.raises(Refusal) as refusal:
        imported(source, f"{WORDS} name=in out={tmp_path} {words}")
    assert told in str(refusal.value)
    assert not (tmp_path / "in" / "checkpoints").exists()


@pytest.mark.parametrize("source", ["nothing", "a/b/c", "owner/na me"])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(Refusal, match="there is no such folder"):
        import_hf.fetched(source)


def test_exports_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = imported(save(tmp_path / "theirs"), f"{WORDS} name=in out={tmp_path}")
    (tmp_path / "file").touch()
    for folder, told in [("file", "is a file"), ("theirs", "not empty"), ("file/in", "instead: a folder that can be")]:
        with pytest.raises(Refusal, match=told):
            exported(run, tmp_path / folder)
    with pytest.raises(Refusal, match="no such folder"):
        exported(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    exported(run, ".")
    assert (tmp_path / "here" / "config.json").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refusal, match="without torchrun"):
        exported(run, tmp_path / "other")


def test_only_tokens_of_the_tokenizer_are_written(tmp_path: Path) -> None:
    """Of a model whose vocabulary has more, which are the likeliest here."""
    config = tiny(**(LLAMA | {"vocab_size": 300, "vocab_multiple": 1}))
    decoder = random_decoder(config)
    source = save(tmp_path / "theirs", vocab_size=300)
    state = state_to_huggingface(config, decoder.state_dict())
    state["lm_head.weight"][257:] = 100 * state["lm_head.weight"][:1].abs()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    run = imported(source, f"{WORDS} name=in out={tmp_path}")
    words = [str(run), "--temperature", "5", "--tokens", "8", "hardware.device=cpu", "--prompt", "A"]
    (text,) = generate.generate(generate.parse(words))
    assert text.startswith("A")
