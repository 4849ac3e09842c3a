"""Held-out loss against a loop over single tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.evals.fakes import forward, token_loss, tokens_of
from training.evals.heldout import Heldout, scored_documents
from training.evals.loss import row_nats
from training.evals.task import Score
from training.ranks import Ranks
from training.tokenizers import Bytes

EOT = Bytes.end_of_text


def score(texts: list[str], most_tokens: int, length: int, batch: int = 4, model: Any = forward) -> dict[str, Score]:
    task = Heldout(tokens_of(texts, Bytes()), most_tokens, EOT, length)
    nats = row_nats(model, task.rows, (batch, task.rows.width), Ranks.alone(), 0, 1, "cpu")
    return {score.metric: score for score in task.scores(nats)}


def test_k3_last_window_counts_by_its_tokens() -> None:
    """Sums and counts (90, 9) and (2, 1): 92 / 10, not the mean of 10 and 2."""

    def model(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        full = (labels != -100).all(dim=1, keepdim=True)
        return torch.where(labels == -100, 0.0, torch.where(full, 10.0, 2.0))

    got = score(["ninebytes"], 100, length=9, model=model)
    assert got["loss"].value == pytest.approx(9.2, rel=1e-15)
    assert got["loss"].n == 10
    assert got["perplexity"].value == pytest.approx(math.exp(9.2))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text("aé漢 ", min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_each_token_is_predicted_once(texts: list[str], most_tokens: int, length: int, batch: int) -> None:
    """Loss, perplexity and bits per byte from a plain loop; bytes are those of the text."""
    chosen: list[str] = []
    for text in texts:
        if chosen and sum(len(c.encode()) + 1 for c in [*chosen, text]) > most_tokens:
            break
        chosen.append(text)
    stream = [i for text in chosen for i in [*text.encode(), EOT]]
    total = text_total = 0.0
    for i, label in enumerate(stream):
        begin = i // length * length
        loss = token_loss([EOT, *stream][begin : i + 1], label)
        total += loss
        text_total += loss if label != EOT else 0.0

    got = score(texts, most_tokens, length, batch)
    assert got["loss"].value == pytest.approx(total / len(stream), rel=1e-12)
    assert got["loss"].n == len(stream)
    assert got["perplexity"].value == pytest.approx(math.exp(total / len(stream)), rel=1e-9)
    size = sum(len(text.encode()) for text in chosen)
    assert got["bits_per_byte"].value == pytest.approx(text_total / size / math.log(2), rel=1e-12)
    assert got["bits_per_byte"].n == size


def test_uniform_model_of_bytes_has_eight_bits() -> None:
    """Each of 256 bytes equally likely; what end-of-text costs is not counted in bits per byte, but is in the loss."""

    def model(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.where(labels == EOT, 50.0, math.log(256.0)).double()
        return torch.where(labels == -100, 0.0, losses)

    got = score(["naïve", "漢字"], 100, length=4, model=model)
    assert got["bits_per_byte"].value == pytest.approx(8.0, rel=1e-7)
    assert got["loss"].value == pytest.approx((12 * math.log(256) + 2 * 50) / 14, rel=1e-7)


def test_documents_are_whole_and_at_least_one() -> None:
    tokens = tokens_of(["abc", "de", "f"], Bytes())  # 4, 3 and 2 tokens
    assert scored_documents(tokens, 1) == (1, 4, 3)
    assert scored_documents(tokens, 6) == (1, 4, 3)
    assert scored_documents(tokens, 7) == (2, 7, 5)
    assert scored_documents(tokens, 10**9) == (3, 9, 6)
    assert scored_documents(tokens_of([], Bytes()), 5) == (0, 0, 0)


def test_standard_error_is_that_of_the_mean_of_equal_windows() -> None:
    texts = ["a" * 15, "bc" * 16 + "a" * 15]
    got = score(texts, 1000, length=16)
    stream = [i for text in texts for i in [*text.encode(), EOT]]
    losses = np.array([token_loss([EOT, *stream][i // 16 * 16 : i + 1], label) for i, label in enumerate(stream)])
    windows = losses.reshape(4, 16)
    expected = float(np.std(windows.mean(axis=1), ddof=1)) / 2
    assert got["loss"].stderr == pytest.approx(expected, rel=1e-12)
    assert got["perplexity"].stderr == pytest.approx(expected * got["perplexity"].value, rel=1e-12)

    text = np.array(stream).reshape(4, 16) != EOT
    assert text.sum(axis=1).tolist() == [15, 16, 16, 15]
    residuals = (windows * text).sum(axis=1) - (windows * text).sum() / 62 * text.sum(axis=1)
    assert got["bits_per_byte"].stderr == pytest.approx(2 * np.std(residuals, ddof=1) / 62 / math.log(2), rel=1e-12)
    assert score(["one window"], 1000, length=16)["loss"].stderr is None


def test_hash_names_what_is_scored() -> None:
    base = score(["abc", "de"], 100, length=4)["loss"].items_hash
    assert score(["abc", "de"], 100, length=4, batch=1)["loss"].items_hash == base
    others = [(["abc", "df"], 100, 4), (["abc", "de"], 4, 4), (["abc", "de"], 100, 5)]
    assert len({base, *(score(*other)["loss"].items_hash for other in others)}) == 4


def test_a_diverged_model_has_a_score() -> None:
    def constant(value: float) -> Any:
        return lambda tokens, labels: torch.full(labels.shape, value)

    assert score(["abc"], 100, 4, model=constant(1e4))["perplexity"].value == math.inf
    assert math.isnan(score(["abc"], 100, 4, model=constant(math.nan))["loss"].value)
