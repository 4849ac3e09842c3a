"""Documents kept apart in a batch, against the documents that the shards name."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training.config import Shuffle
from training.data.batches import Batches
from training.data.order import Order
from training.data.packing import packed
from training.data.shards import Meaning, Shard, ShardsWriter, Tokens

CPU, END, LENGTH = torch.device("cpu"), 256, 16
LENGTHS = [1, 5, 16, 3, 1, 1, 40, 15, 17, 2, 33, 8]  # tokens of each document, its end among them: 142


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """Each token of a text is its place, below END."""
    writer = ShardsWriter(tmp_path, "train", Meaning("toy", "0123", 257), shard_tokens=50)
    place = 0
    for length in LENGTHS:
        ids = np.arange(place, place + length)
        ids[-1] = END
        writer.add(ids, np.array([length]), np.array([length - 1]))
        place += length
    return Tokens([Shard(tmp_path / name, Meaning("toy", "0123", 257)) for name in writer.close()])


def batches(tokens: Tokens, rank: int = 0, ranks: int = 1, micro: int = 2, end: int | None = END) -> Batches:
    order = Order(len(tokens), LENGTH, 3, Shuffle.full)
    return Batches(tokens, order, 6, micro, rank, ranks, CPU, 1, end)


def expected(tokens: Tokens, start: int) -> tuple[list[int], list[int], list[int]]:
    """Documents, positions and labels of the sample that begins at a token, one token after the other, from the starts
    that the shards name. The last token of the text is followed by the first."""
    starts = set(tokens.documents.tolist())
    ids = tokens.read(0, len(tokens)).tolist()
    documents, positions, labels = [0], [0], []
    for place in range(start + 1, start + LENGTH + 1):
        begins = place % len(tokens) in starts
        labels.append(-100 if begins else ids[place % len(tokens)])
        documents.append(documents[-1] + begins)
        positions.append(0 if begins else positions[-1] + 1)
    return documents[:-1], positions[:-1], labels


def test_documents_positions_and_labels_are_those_of_the_shards(tokens: Tokens) -> None:
    assert tokens.documents.tolist() == np.cumsum([0, *LENGTHS[:-1]]).tolist() and len(tokens.shards) > 1
    order = Order(len(tokens), LENGTH, 3, Shuffle.full)
    seen = 0
    for step in range(4):
        starts = order.starts(np.arange(step * 6, step * 6 + 6)).tolist()
        batch = batches(tokens).at(step)
        rows = [[part[name][row].tolist() for name in part] for part in batch.micro_batches for row in range(2)]
        assert [list(part) for part in batch.micro_batches] == [["tokens", "labels", "documents", "positions"]] * 3
        for start, (_, labels, documents, positions) in zip(starts, rows, strict=True):
            assert (documents, positions, labels) == expected(tokens, start)
        assert batch.predicted == sum(label != -100 for row in rows for label in row[1])
        seen += batch.predicted
    assert seen < 4 * 6 * LENGTH


@pytest.mark.parametrize("micro", [1, 3])
def test_any_ranks_and_micro_batches_give_the_same(tokens: Tokens, micro: int) -> None:
    whole = batches(tokens).at(1)
    shares = [batches(tokens, rank, 2, micro).at(1) for rank in range(2)]
    assert sum(share.predicted for share in shares) == whole.predicted
    for name in ("tokens", "labels", "documents", "positions"):
        parts = [part[name] for share in shares for part in share.micro_batches]
        assert torch.equal(torch.cat(parts), torch.cat([part[name] for part in whole.micro_batches]))


def test_nothing_changes_where_documents_are_not_kept_apart(tokens: Tokens) -> None:
    plain, apart = batches(tokens, end=None).at(2), batches(tokens).at(2)
    assert plain.predicted == 6 * LENGTH and plain.digest == apart.digest
    for part, other in zip(plain.micro_batches, apart.micro_batches, strict=True):
        assert list(part) == ["tokens", "labels"] and torch.equal(part["tokens"], other["tokens"])


def test_a_sequence_that_begins_with_an_end() -> None:
    inputs = packed(torch.tensor([[END, 1, 2, END, END, 3], [1, 2, 3, 4, 5, END]]), END)
    assert inputs["documents"].tolist() == [[0, 1, 1, 1, 2, 3], [0] * 6]
    assert inputs["positions"].tolist() == [[0, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5]]
