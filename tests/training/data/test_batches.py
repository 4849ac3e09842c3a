"""Batches: a function of the tokens consumed, the same for any number of ranks, made ready by a thread that ends."""

import hashlib
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from models.head import IGNORED
from training.config import Shuffle
from training.data.batches import Batch, Batches, BatchFailed
from training.data.order import Order
from training.data.shards import HEADER_BYTES, Meaning, Shard, ShardsWriter, Tokens

CPU = torch.device("cpu")
MEANING = Meaning("toy", "0123", 1000)


def tokens_of(folder: Path, ids: np.ndarray) -> Tokens:
    writer = ShardsWriter(folder, "train", MEANING, shard_tokens=100)
    for part in np.array_split(ids, 7):
        writer.add(part, np.array([len(part)]), np.array([1]))
    return Tokens([Shard(folder / name, MEANING) for name in writer.close()])


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """0 to 508: each token is its own place."""
    return tokens_of(tmp_path, np.arange(509))


def batches(
    tokens: Tokens,
    rank: int = 0,
    ranks: int = 1,
    micro: int = 1,
    prefetch: int = 2,
    shuffle: Shuffle = Shuffle.full,
) -> Batches:
    """12 sequences of 8 tokens a step."""
    return Batches(tokens, Order(len(tokens), 8, 3, shuffle), 12, micro, rank, ranks, CPU, prefetch)


def rows(batch: Batch) -> list[list[int]]:
    return [row for part in batch.micro_batches for row in part["tokens"].tolist()]


def test_labels_are_the_next_tokens(tokens: Tokens) -> None:
    for step in range(12):
        for part in batches(tokens, micro=3).at(step).micro_batches:
            assert part["tokens"].dtype == part["labels"].dtype == torch.int64
            assert part["tokens"].shape == part["labels"].shape == (3, 8)
            assert part["tokens"].is_contiguous() and part["labels"].is_contiguous()
            assert torch.equal((part["tokens"] + 1) % 509, part["labels"])


def test_a_step_has_the_samples_of_its_indices(tokens: Tokens) -> None:
    order = Order(509, 8, 3)
    for step in (0, 5, 6, 100):
        starts = order.starts(np.arange(step * 12, step * 12 + 12))
        assert rows(batches(tokens).at(step)) == [[(s + n) % 509 for n in range(8)] for s in starts.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_ranks_share_the_step(tokens: Tokens, ranks: int) -> None:
    for step in (0, 5, 6):
        for micro in [m for m in (1, 2, 3) if 12 // ranks % m == 0]:
            shares = [batches(tokens, rank, ranks, micro).at(step) for rank in range(ranks)]
            assert [row for share in shares for row in rows(share)] == rows(batches(tokens).at(step))
            assert all(len(share.micro_batches) == 12 // ranks // micro for share in shares)
            assert sum(share.predicted for share in shares) == 12 * 8


def test_every_token_of_an_epoch_is_predicted_once(tokens: Tokens) -> None:
    # 64 samples an epoch, 12 a step: 16 steps are three epochs.
    labels = torch.cat(
        [part["labels"].flatten() for step in range(16) for part in batches(tokens).at(step).micro_batches]
    )
    counts = torch.bincount(labels, minlength=509)
    assert counts.min() == 3 and counts.sum() == 3 * 512


def test_a_text_shorter_than_a_sequence(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, np.arange(3))
    assert rows(Batches(tokens, Order(3, 8, 0), 1, 1, 0, 1, CPU, 0).at(0)) == [[0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_from_any_step_on_it_is_the_same_run(tokens: Tokens, prefetch: int) -> None:
    """Also over the end of an epoch, and whatever was read ahead."""
    whole = [batches(tokens).at(step) for step in range(15)]
    for first in (0, 4, 5, 11):
        iterator = batches(tokens, prefetch=prefetch).iterate(first, first * 12 * 8)
        for expected in whole[first : first + 4]:
            batch = next(iterator)
            assert (batch.step, batch.digest) == (expected.step, expected.digest)
            assert rows(batch) == rows(expected)
        iterator.close()


def test_another_batch_goes_on_where_the_tokens_end(tokens: Tokens) -> None:
    """5 steps of 12 sequences of 8 tokens, then steps of 3; then sequences of 7, which begin at a whole one."""
    order = Order(509, 8, 3)
    iterator = Batches(tokens, order, 3, 1, 0, 1, CPU, 2).iterate(5, 5 * 12 * 8)
    for step, sample in ((5, 60), (6, 63), (7, 66)):
        batch = next(iterator)
        starts = order.starts(np.arange(sample, sample + 3)).tolist()
        assert batch.step == step and rows(batch) == [[(s + n) % 509 for n in range(8)] for s in starts]
    iterator.close()
    shorter = Order(509, 7, 3)
    iterator = Batches(tokens, shorter, 2, 1, 0, 1, CPU, 0).iterate(5, 480)
    starts = shorter.starts(np.arange(69, 71)).tolist()  # 480 / 7 = 68.6
    assert rows(next(iterator)) == [[(s + n) % 509 for n in range(7)] for s in starts]
    iterator.close()


def test_the_digest_is_of_the_tokens(tokens: Tokens) -> None:
    order = Order(509, 8, 3)
    starts = order.starts(np.arange(18, 24))
    ids = np.array([[(s + n) % 509 for n in range(9)] for s in starts.tolist()], np.uint16)
    assert batches(tokens, 1, 2).at(1).digest == hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
    assert len({batches(tokens).at(step).digest for step in range(20)}) == 20


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_the_thread_ends_with_the_iterator(tokens: Tokens) -> None:
    iterator = batches(tokens).iterate(0, 0)
    next(iterator)
    assert reading_threads()
    iterator.close()
    assert not reading_threads()
    for _ in zip(range(3), batches(tokens).iterate(0, 0), strict=False):
        pass
    assert not reading_threads()


def test_an_error_names_step_and_file(tokens: Tokens) -> None:
    path = tokens.shards[1].path
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES)
        file.write((2000).to_bytes(2, "little"))
    iterator = batches(tokens, shuffle=Shuffle.none).iterate(0, 0)
    # The second shard begins with token 73, in the tenth sample of the first step.
    with pytest.raises(BatchFailed, match=r"step 0: .*train-00001\.tokens: token 0 is 2000"):
        next(iterator)
    assert not reading_threads()
    with pytest.raises(BatchFailed, match="step 6"):
        list(zip(range(9), batches(tokens, shuffle=Shuffle.none).iterate(1, 96), strict=False))


def test_waiting_is_measured(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Batches._read

    def slow(self: Batches, step: int, sample: int):
        time.sleep(0.05)
        return read(self, step, sample)

    monkeypatch.setattr(Batches, "_read", slow)
    waiting = batches(tokens)
    iterator = waiting.iterate(0, 0)
    for _ in range(3):
        next(iterator)
    assert waiting.wait_seconds >= 0.1
    time.sleep(0.3)
    before = waiting.wait_seconds
    next(iterator)
    assert waiting.wait_seconds - before < 0.05
    iterator.close()


@pytest.mark.parametrize(("ranks", "micro", "each"), [(5, 1, 3), (4, 2, 4), (1, 5, 15), (7, 1, 2), (9, 1, 2)])
def test_a_batch_that_does_not_divide_is_filled_up(tokens: Tokens, ranks: int, micro: int, each: int) -> None:
    """12 sequences: what is beyond them has no labels, and all ranks compute as many."""
    whole = rows(batches(tokens).at(3))
    found = [batches(tokens, rank, ranks, micro).at(3) for rank in range(ranks)]
    labels = [torch.cat([part["labels"] for part in batch.micro_batches]) for batch in found]
    assert [len(part) for part in labels] == [each] * ranks
    of_text = torch.cat(labels) != IGNORED
    assert of_text.all(1).tolist() == [True] * 12 + [False] * (ranks * each - 12)
    assert not of_text[12:].any()
    assert [row for batch in found for row in rows(batch)][:12] == whole
    assert [batch.predicted for batch in found] == [int((part != IGNORED).sum()) for part in labels]
    assert all("documents" not in part for batch in found for part in batch.micro_batches)


@pytest.mark.parametrize("end_of_text", [None, 100])
def test_what_fills_up_is_marked_by_its_documents(tokens: Tokens, end_of_text: int | None) -> None:
    def documents(ranks: int) -> list[torch.Tensor]:
        order = Order(len(tokens), 8, 3)
        made = [Batches(tokens, order, 12, 1, rank, ranks, CPU, 2, end_of_text, True) for rank in range(ranks)]
        return [part["documents"] for rank in made for part in rank.at(2).micro_batches if "documents" in part]

    marked = torch.cat(documents(5))
    assert (marked[12:] == -1).all() and len(marked) == 15
    assert torch.equal(marked[:12], torch.cat(documents(1)) if end_of_text else torch.zeros(12, 8, dtype=torch.int64))
    assert end_of_text or not documents(4)  # nothing is filled up
