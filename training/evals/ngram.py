"""What counting alone reaches on the same text: byte n-grams, to print beside the model's bits per byte."""

import numpy as np

CHUNK = 1 << 24  # bytes counted at once, which bounds the memory


def bits_per_byte(train: bytes, heldout: bytes, order: int) -> float:
    """Bits per byte of `heldout` under an n-gram model of bytes counted in `train`; order 2 is a bigram, 3 a trigram.

    Witten-Bell smoothing (Witten and Bell 1991): p(c | h) = (count(hc) + T(h) p(c | h')) / (count(h) + T(h)). T(h)
    is the number of different bytes seen after h, h' is h without its first byte, and single bytes fall back to 1/256.
    Needs 8 x 256^order bytes of memory, so the order is at most 3.
    """
    counted = np.frombuffer(train, dtype=np.uint8)
    scored = np.frombuffer(heldout, dtype=np.uint8)
    p = np.full(len(scored), 1 / 256)
    for n in range(1, order + 1):
        counts = _counts(counted, n).reshape(-1, 256)
        grams = _grams(scored, n)
        history = grams // 256
        total = counts.sum(axis=1)[history]
        kinds = np.count_nonzero(counts, axis=1)[history]
        seen = np.flatnonzero(total)
        at = seen + n - 1
        p[at] = (counts.reshape(-1)[grams[seen]] + kinds[seen] * p[at]) / (total[seen] + kinds[seen])
    return float(-np.log2(p).mean())


def _grams(text: np.ndarray, n: int) -> np.ndarray:
    """Each n bytes in a row as one number, int64 [len(text) - n + 1]."""
    grams = np.zeros(max(len(text) - n + 1, 0), dtype=np.int64)
    for i in range(n):
        grams = grams * 256 + text[i : len(grams) + i]
    return grams


def _counts(text: np.ndarray, n: int) -> np.ndarray:
    counts = np.zeros(256**n, dtype=np.int64)
    for first in range(0, len(text), CHUNK):
        counts += np.bincount(_grams(text[first : first + CHUNK + n - 1], n), minlength=256**n)
    return counts
