"""The order of samples: a permutation of each epoch, the same for ever, with no token lost."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.derive import derive
from training.config import Shuffle
from training.data.order import Order, permute

SIZES = st.one_of(st.integers(1, 70), st.integers(1, 5000))


@given(SIZES, st.integers(0, 3), st.integers(0, 2**40), st.sampled_from(Shuffle), st.integers(1, 50))
@settings(deadline=None, max_examples=60)
def test_each_epoch_has_each_sample_once(samples: int, epoch: int, seed: int, shuffle: Shuffle, block: int) -> None:
    order = Order(samples * 3, 3, seed, shuffle, block)
    indices = np.arange(epoch * samples, (epoch + 1) * samples)
    starts = order.starts(indices)
    assert starts.dtype == np.int64
    assert sorted(starts.tolist()) == list(range(0, samples * 3, 3))
    # One at a time, or in any other company, an index means the same sample.
    some = indices[:: max(samples // 5, 1)][::-1]
    assert [int(order.starts(np.array([index]))[0]) for index in some] == order.starts(some).tolist()


@given(st.integers(1, 400), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_every_token_of_an_epoch_is_predicted(tokens: int, sequence_length: int) -> None:
    order = Order(tokens, sequence_length, 0)
    assert order.samples_per_epoch == -(-tokens // sequence_length)
    starts = order.starts(np.arange(order.samples_per_epoch))
    predicted = Counter((start + 1 + n) % tokens for start in starts.tolist() for n in range(sequence_length))
    assert set(predicted) == set(range(tokens))
    assert sum(predicted.values()) - tokens < sequence_length


def test_indices_may_cross_epochs() -> None:
    order = Order(70, 10, 5)
    whole = order.starts(np.arange(21))
    assert order.starts(np.arange(5, 16)).tolist() == whole[5:16].tolist()
    for epoch in whole.reshape(3, 7):
        assert sorted(epoch) == list(range(0, 70, 10))


@pytest.mark.parametrize("shuffle", [Shuffle.full, Shuffle.two_level])
def test_epochs_and_seeds_differ(shuffle: Shuffle) -> None:
    orders = [Order(1000, 1, seed, shuffle, 50).starts(np.arange(2000)) for seed in (0, 1)]
    epochs = [*orders[0].reshape(2, 1000), *orders[1].reshape(2, 1000), np.arange(1000)]
    for n, one in enumerate(epochs):
        for other in epochs[:n]:
            # Two random permutations of 1000 agree in one place on average; more than ten is a chance of 1e-8.
            assert (one == other).sum() <= 10


def test_no_shuffle_is_the_order_of_the_corpus() -> None:
    assert Order(25, 10, 0, Shuffle.none).starts(np.arange(7)).tolist() == [0, 10, 20, 0, 10, 20, 0]


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=5)


@given(RANGES, st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_what_is_left_out_is_passed_over(ranges: list[tuple[int, int]], samples: int) -> None:
    """Also where ranges touch, lie in each other or reach into the next epoch."""
    whole = Order(samples, 1, 7)
    without = replace(whole, left_out=tuple((first, first + count) for first, count in ranges))
    gone = {index for first, count in ranges for index in range(first, first + count)}
    kept = [index for index in range(200) if index not in gone][:100]
    assert without.unskipped(np.arange(100)).tolist() == kept
    assert without.starts(np.arange(100)).tolist() == whole.starts(np.array(kept)).tolist()
    assert without.starts(np.arange(99, -1, -7)).tolist() == whole.starts(np.array(kept))[::-7].tolist()


def scalar_permute(value: int, size: int, key: int) -> int:
    """The permutation again, in plain Python integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    half = 3
    while 4**half < size:
        half += 1
    while True:
        left, right = divmod(value, 2**half)
        for n in range(8):
            left, right = right, left ^ mix(right + mix(key + n * 0x9E3779B97F4A7C15 & mask) & mask) % 2**half
        value = left * 2**half + right
        if value < size:
            return value


@given(st.integers(1, 2**40), st.integers(0, 2**63 - 1), st.data())
@settings(deadline=None)
def test_the_permutation_is_the_documented_one(size: int, key: int, data) -> None:
    """A saved run continues only if this never changes, so it is written down twice."""
    values = data.draw(st.lists(st.integers(max(size - 300, 0), size - 1), min_size=1, max_size=5))
    expected = [scalar_permute(value, size, key) for value in values]
    assert permute(np.array(values), size, np.array([key], np.uint64)).tolist() == expected


def test_the_order_never_changes() -> None:
    key = derive(7, "order", 1)
    assert Order(60, 6, 7).starts(np.arange(10, 20)).tolist() == [6 * scalar_permute(n, 10, key) for n in range(10)]


def test_small_permutations_are_evenly_drawn() -> None:
    """All 120 orders of 5 over 6000 keys: chi-squared of 119 degrees of freedom is below 185 but once in 10,000."""
    seen: Counter[tuple[int, ...]] = Counter()
    keys = np.array([derive("even", n) for n in range(6000)], np.uint64)
    columns = [permute(np.full(6000, n), 5, keys) for n in range(5)]
    seen.update(map(tuple, np.stack(columns, 1).tolist()))
    assert len(seen) == 120
    assert sum((count - 50) ** 2 / 50 for count in seen.values()) < 185


def test_neighbours_are_parted() -> None:
    """In a random order of 100,000, about one pair of neighbours stays together; and places tell nothing of samples."""
    starts = Order(100_000, 1, 3).starts(np.arange(100_000))
    assert (np.abs(np.diff(starts)) == 1).sum() < 12
    assert abs(np.corrcoef(np.arange(100_000), starts)[0, 1]) < 0.02


def test_two_levels_read_block_by_block() -> None:
    samples, block = 1037, 100
    order = Order(samples, 1, 11, Shuffle.two_level, block)
    short_slots = set()
    for epoch in range(40):
        starts = order.starts(np.arange(epoch * samples, (epoch + 1) * samples))
        runs = [int(b) for n, b in enumerate(starts // block) if n == 0 or b != starts[n - 1] // block]
        assert sorted(runs) == list(range(11))
        assert runs != sorted(runs)
        short_slots.add(runs.index(10))
        first = starts[starts // block == runs[0]] % block
        assert first.tolist() != sorted(first.tolist())
    assert len(short_slots) > 5


def test_blocks_have_orders_of_their_own() -> None:
    starts = Order(1000, 1, 2, Shuffle.two_level, 100).starts(np.arange(1000))
    assert len({tuple(within) for within in (starts % 100).reshape(10, 100).tolist()}) == 10
