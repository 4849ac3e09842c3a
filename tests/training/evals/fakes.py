"""Small stand-ins: tokens in memory, a tokenizer with long tokens, a model whose losses can be worked out."""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch

from models.derive import derive
from training.data.shards import Tokens
from training.evals.task import IGNORED
from training.tokenizers import Bytes, Tokenizer


class MergingTokenizer(Bytes):
    """The longest of `merges` that matches is one token (257, 258, ...), else a byte is."""

    name = "fake merging"
    fingerprint = "fake merging"

    def __init__(self, merges: Sequence[bytes]) -> None:
        self.merges = list(merges)
        self.vocab_size = 257 + len(merges)

    def encode(self, text: str) -> list[int]:
        left, ids = text.encode(), []
        while left:
            fits = [merge for merge in self.merges if left.startswith(merge)]
            token = max(fits, key=len, default=left[:1])
            ids.append(257 + self.merges.index(token) if token in self.merges else token[0])
            left = left[len(token) :]
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(b"" if i == 256 else bytes([i]) if i < 256 else self.merges[i - 257] for i in ids)


class _ListTokens:
    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        encoded = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
        self.ids = np.array([i for document in encoded for i in document], dtype=np.uint16)
        self.documents = np.cumsum([0, *map(len, encoded)])[: len(texts)].astype(np.int64)
        self.document_bytes = np.array([len(text.encode()) for text in texts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self.ids)
        return self.ids[start:stop]


def tokens_of(texts: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Documents in memory, each ending with end-of-text."""
    return cast(Tokens, _ListTokens(texts, tokenizer))


def words(seed: str, count: int, alphabet: str = "abcdefghij") -> str:
    """A made-up text, the same on every machine."""
    letters = [derive(seed, i, "length") % 7 + 1 for i in range(count)]
    drawn = ["".join(alphabet[derive(seed, i, j) % len(alphabet)] for j in range(n)) for i, n in enumerate(letters)]
    return " ".join(drawn)


def token_loss(prefix: Sequence[int], label: int) -> float:
    """The fake model: the loss of a token depends on every token before it in the window, and on their order."""
    state = 0
    for token in prefix:
        state = (31 * state + token + 1) % 997
    return ((7 * state + label) % 101) / 8


def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`token_loss` of each position, 0 where the label is ignored."""
    assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape
    state = torch.zeros(len(tokens), dtype=torch.int64)
    losses = torch.zeros(tokens.shape)
    for t in range(tokens.shape[1]):
        state = (31 * state + tokens[:, t] + 1) % 997
        losses[:, t] = torch.where(labels[:, t] == IGNORED, 0.0, ((7 * state + labels[:, t]) % 101) / 8)
    return losses
