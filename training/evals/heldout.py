"""Language-model loss on the held-out text: each token predicted once, bytes counted in the original text."""

import hashlib
import math

import numpy as np

from training.data.shards import Tokens
from training.evals.task import IGNORED, Rows, Score


def scored_documents(tokens: Tokens, most_tokens: int) -> tuple[int, int, int]:
    """The whole documents from the start of the stream that have at most so many tokens together, but one at least.

    Returns (documents, their tokens, bytes of their text); zeros where there are no documents.
    """
    if len(tokens.documents) == 0:
        return 0, 0, 0
    ends = np.append(tokens.documents[1:], len(tokens))
    count = max(1, int(np.searchsorted(ends, most_tokens, side="right")))
    return count, int(ends[count - 1]), int(tokens.document_bytes[:count].sum())


class Heldout:
    """Whole documents from the start of the held-out stream, each token predicted once.

    The stream is cut into windows of the training length. A token is predicted from those before it in its window and
    the last one of the window before; the first of the stream from end-of-text.
    """

    def __init__(self, tokens: Tokens, most_tokens: int, end_of_text: int, sequence_length: int) -> None:
        self.documents, self.count, self.bytes = scored_documents(tokens, most_tokens)
        self.tokens = tokens
        self.length = sequence_length
        self.rows = Rows(-(-self.count // sequence_length), sequence_length, end_of_text, self._windows)
        digest = hashlib.sha256(f"heldout {sequence_length} {self.bytes} ".encode())
        digest.update(tokens.read(0, self.count).astype("<u4").tobytes())
        self.items_hash = digest.hexdigest()

    def _windows(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        begin, end = first * self.length, min(stop * self.length, self.count)
        before = [self.rows.end_of_text] if begin == 0 else self.tokens.read(begin - 1, begin)
        stream = np.concatenate([before, self.tokens.read(begin, end)]).astype(np.int64)
        padding = (0, (stop - first) * self.length - (end - begin))
        tokens = np.pad(stream[:-1], padding, constant_values=self.rows.end_of_text)
        labels = np.pad(stream[1:], padding, constant_values=IGNORED)
        return tokens.reshape(-1, self.length), labels.reshape(-1, self.length)

    def scores(self, nats: np.ndarray) -> list[Score]:
        """loss: nats a token, over all tokens. perplexity: exp(loss). bits_per_byte: nats of the text's tokens /
        (ln 2 x bytes of the text); end-of-text is no part of the text.

        Standard errors are those of a ratio of sums over windows, as if windows were independent; none for one window.
        Perplexity's follows from the loss's to first order.
        """
        ends = np.append(self.tokens.documents[1 : self.documents], self.count)
        begins = np.arange(self.rows.count) * self.length
        lengths = np.minimum(self.count - begins, self.length)
        text_lengths = lengths - np.bincount((ends - 1) // self.length, minlength=self.rows.count)

        loss = float(nats[:, 0].sum() / self.count)
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        bits_per_byte = float(nats[:, 1].sum() / (math.log(2) * self.bytes))
        loss_error = _error_of_sum(nats[:, 0], lengths) / self.count
        bits_error = _error_of_sum(nats[:, 1], text_lengths) / (math.log(2) * self.bytes)
        values = [
            ("loss", loss, loss_error, self.count),
            ("perplexity", perplexity, perplexity * loss_error, self.count),
            ("bits_per_byte", bits_per_byte, bits_error, self.bytes),
        ]
        known = self.rows.count > 1
        return [
            Score("heldout", metric, value, error if known else None, n, self.items_hash)
            for metric, value, error, n in values
        ]


def _error_of_sum(nats: np.ndarray, lengths: np.ndarray) -> float:
    """Standard error of the sum of `nats` for given lengths: sqrt(W / (W - 1) x sum of (nats - mean x length)^2).

    The estimator of a ratio (Cochran, Sampling Techniques, 1977, chapter 6) with W windows; zero for one.
    """
    residuals = nats - nats.sum() / lengths.sum() * lengths
    windows = len(nats)
    return math.sqrt(windows / max(windows - 1, 1) * float(residuals @ residuals))
