"""n-grams against a loop over dictionaries, and against what must hold for any probability."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.evals.fakes import words
from training.evals import ngram
from training.evals.ngram import bits_per_byte

Text = st.binary(max_size=60) | st.lists(st.sampled_from(b"ab "), max_size=60).map(bytes)


def probability(train: bytes, history: bytes, byte: int) -> float:
    """Witten-Bell, written as its recursion."""
    lower = probability(train, history[1:], byte) if history else 1 / 256
    n = len(history) + 1
    after = Counter(train[i + n - 1] for i in range(len(train) - n + 1) if train[i : i + n - 1] == history)
    if not after:
        return lower
    return (after[byte] + len(after) * lower) / (after.total() + len(after))


@settings(deadline=None, max_examples=40)
@given(Text, Text.filter(len), st.sampled_from([1, 2, 3]))
def test_against_the_recursion(train: bytes, heldout: bytes, order: int) -> None:
    bits = [-math.log2(probability(train, heldout[max(i - order + 1, 0) : i], byte)) for i, byte in enumerate(heldout)]
    assert bits_per_byte(train, heldout, order) == pytest.approx(sum(bits) / len(bits), rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    train = words("text", 40).encode()
    for history in (b"", b"a", b"\xff", b"ab"):
        assert sum(probability(train, history, byte) for byte in range(256)) == pytest.approx(1.0)


def test_known_entropies() -> None:
    """A coin has one bit a byte, which no order beats; a cycle has none from the second order on."""
    coin = np.random.default_rng(0).choice(np.frombuffer(b"ht", dtype=np.uint8), 200_000).tobytes()
    for order in (1, 2, 3):
        assert bits_per_byte(coin[:150_000], coin[150_000:], order) == pytest.approx(1.0, abs=2e-3)
    assert bits_per_byte(b"abc" * 50_000, b"abc" * 1000, 1) == pytest.approx(math.log2(3), abs=1e-3)
    assert bits_per_byte(b"abc" * 50_000, b"abc" * 1000, 2) < 2e-3


def test_chunks_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, heldout = words("train", 200).encode(), words("heldout", 50).encode()
    whole = bits_per_byte(train, heldout, 2)
    monkeypatch.setattr(ngram, "CHUNK", 7)
    assert bits_per_byte(train, heldout, 2) == pytest.approx(whole, rel=1e-12)
