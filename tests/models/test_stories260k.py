"""A real trained Llama-shaped model, its greedy text and golden losses (llama2.c's stories260K, MIT)."""

import math
import struct
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import FeedForward, ModelConfig, Norm, Position
from models.decoder import Decoder
from tests.models.build import logits_of
from tests.ranks import ROOT

FOLDER = ROOT.parent / "shared" / "data" / "oracles" / "stories260k"
BEGIN = 1  # the token before each text

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="../shared/data/oracles/stories260k is not here")


def halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys whose rotary pairs are neighbours, to those whose pairs lie half a head apart."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(scope="module")
def model() -> Any:
    content = (FOLDER / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, groups, vocabulary, context = struct.unpack("<7i", content[:28])
    values = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    config = ModelConfig(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=groups,
        ffn_dim=hidden,
        vocab_size=vocabulary,
        context=context,
        fused_qkv=False,
        ffn=FeedForward.swiglu,
        norm=Norm.rmsnorm,
        position=Position.rotary,
        bias=False,
    )

    def take(*shape: int) -> Tensor:
        nonlocal values
        taken, values = values[: math.prod(shape)].view(shape), values[math.prod(shape) :]
        return taken

    keys = groups * dim // heads
    state = {"embed.tokens.weight": take(vocabulary, dim)}
    stacked = {
        "attention_norm": take(layers, dim),
        "attention.q": take(layers, dim, dim),
        "attention.k": take(layers, keys, dim),
        "attention.v": take(layers, keys, dim),
        "attention.out": take(layers, dim, dim),
        "feedforward_norm": take(layers, dim),
        "feedforward.gate": take(layers, hidden, dim),
        "feedforward.down": take(layers, dim, hidden),
        "feedforward.up": take(layers, hidden, dim),
    }
    for name, of_layers in stacked.items():
        for layer, weight in enumerate(of_layers):
            turned = {"attention.q": heads, "attention.k": groups}.get(name)
            state[f"blocks.{layer}.{name}.weight"] = weight if turned is None else halves(weight, turned)
    state["norm.weight"] = take(dim)
    decoder = Decoder(config)
    decoder.load_state_dict(state | {"head.weight": state["embed.tokens.weight"]})
    return decoder.eval()


def pieces() -> list[tuple[bytes, float]]:
    """Text and score of each token."""
    content, place, found = (FOLDER / "tok512.bin").read_bytes(), 4, []
    while place < len(content):
        score, size = struct.unpack("<fi", content[place : place + 8])
        found.append((content[place + 8 : place + 8 + size], score))
        place += 8 + size
    return found


def encoded(text: bytes) -> list[int]:
    """As SentencePiece's BPE does: the best-scored pair of neighbours is merged until there is none."""
    known = pieces()
    ids = {piece: number for number, (piece, _) in reversed(list(enumerate(known)))}
    found = [ids[bytes([byte])] if bytes([byte]) in ids else byte + 3 for byte in b" " + text]
    while True:
        merged = [known[a][0] + known[b][0] for a, b in pairwise(found)]
        scores = [known[ids[piece]][1] if piece in ids else -math.inf for piece in merged]
        if not scores or max(scores) == -math.inf:
            return [BEGIN, *found]
        best = scores.index(max(scores))
        found[best : best + 2] = [ids[merged[best]]]


def losses(model: Any, text: bytes) -> Tensor:
    """Nats of each token of a text."""
    ids = torch.tensor([encoded(text)])
    with torch.no_grad():
        return model(tokens=ids[:, :-1], labels=ids[:, 1:], reduction="none")


def test_it_writes_its_story(model: Any) -> None:
    expected = (FOLDER / "expected.txt").read_bytes()
    ids = torch.tensor([[BEGIN]])
    for _ in range(200):
        ids = torch.cat([ids, logits_of(model, ids)[:, -1:].argmax(-1)], dim=1)
    known = pieces()
    written = b"".join(known[number][0] for number in ids[0, 1:].tolist())
    written = written.replace(b"<0x0A>", b"\n").lstrip()
    assert written.strip() == expected.strip()


def test_golden_losses(model: Any) -> None:
    """Of that text 94.683538 nats over 200 tokens, and 1.049018 a token of another, as NumPy finds in float64."""
    text = (FOLDER / "expected.txt").read_bytes()
    found = losses(model, text)
    assert found.numel() == 200
    assert found.double().sum().item() == pytest.approx(94.683538, abs=1e-3)
    other = losses(model, b"One day, a little cat named Tom went to the river with his mom. He saw a red fish.")
    assert other.double().mean().item() == pytest.approx(1.049018, abs=1e-5)
