"""The order in which training reads its tokens: a pure function of (tokens, seed, index, what is left out)."""

from dataclasses import dataclass

import numpy as np

from models.derive import derive
from training.config import Shuffle

ROUNDS = 8
# Halves of fewer bits mix too little; cycle walking makes small numbers of samples right.
HALF_BITS = 3
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Order:
    """Samples of `sequence_length` + 1 tokens, so that each token of an epoch is predicted.

    Sample k of the unshuffled epoch has the tokens k*T to k*T + T, both included, T = sequence_length; the last goes on
    at the first token. Each epoch is shuffled anew."""

    tokens: int
    sequence_length: int
    seed: int
    shuffle: Shuffle = Shuffle.full
    block: int = 1024
    """two_level: samples in a block. Blocks are shuffled, and samples within each block."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Ranges of samples, the first and the one after the last, that are passed over; counted from the start of the run
    with nothing left out. They may touch and lie in each other."""

    @property
    def samples_per_epoch(self) -> int:
        return -(-self.tokens // self.sequence_length)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """First token of each sample: indices [n] counted from the start of the run -> [n] int64."""
        indices = self.unskipped(indices)
        epochs, places = np.divmod(indices, self.samples_per_epoch)
        samples = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._samples(int(epoch), places[here])
        return samples * self.sequence_length

    def unskipped(self, indices: np.ndarray) -> np.ndarray:
        """Indices [n] of samples that are read -> what they were if nothing were left out, [n] int64."""
        indices = np.array(indices, np.int64)
        end = 0
        for first, stop in sorted(self.left_out):
            first, end = max(first, end), max(stop, end)
            indices[indices >= first] += end - first
        return indices

    def _samples(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self.shuffle is Shuffle.none:
            return places
        key = np.array([derive(self.seed, "order", epoch)], np.uint64)
        if self.shuffle is Shuffle.full:
            return permute(places, self.samples_per_epoch, key)
        return self._two_level(epoch, places, key)

    def _two_level(self, epoch: int, places: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Whole blocks are shuffled; the last, shorter one is put between them at a random slot."""
        whole, rest = divmod(self.samples_per_epoch, self.block)
        short_slot = derive(self.seed, "short block", epoch) % (whole + 1)
        into_short = places - short_slot * self.block
        after_short = into_short >= rest
        slots, offsets = np.divmod(np.where(after_short, places - rest, places), self.block)
        short = (into_short >= 0) & ~after_short
        samples = np.empty_like(places)
        samples[short] = whole * self.block + permute(into_short[short], rest, mix(key + GOLDEN))
        blocks = permute(slots[~short], whole, key)
        block_keys = mix(key ^ mix(blocks.astype(np.uint64)))
        samples[~short] = blocks * self.block + permute(offsets[~short], self.block, block_keys)
        return samples


def permute(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A pseudorandom permutation of 0..size-1, applied to values [n]; uint64 keys [1] or [n], one for all or for each.

    A balanced Feistel network (Luby and Rackoff 1988) over the next even number of bits; what falls outside is put
    through it again until it falls inside (cycle walking, Black and Rogaway 2002), which keeps it a permutation."""
    half = np.uint64(max(HALF_BITS, -(-(size - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    rounds = mix(keys[:, None] + np.arange(ROUNDS, dtype=np.uint64) * GOLDEN)
    rounds = np.broadcast_to(rounds, (len(values), ROUNDS))
    result = values.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        left, right = result[walking] >> half, result[walking] & low
        for key in rounds[walking].T:
            left, right = right, left ^ (mix(right + key) & low)
        result[walking] = left << half | right
        walking = walking[result[walking] >= np.uint64(size)]
    return result.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), modulo 2**64; x: uint64 of any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
