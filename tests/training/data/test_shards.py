"""Token shards: what is written is read, and what is broken is found and named."""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.shards import HEADER_BYTES, MAGIC, BrokenShard, Meaning, Shard, ShardsWriter, ShardWriter, Tokens

MEANING = Meaning("toy", "0123", 300)


def write(folder: Path, documents: list[list[int]], meaning: Meaning = MEANING, shard_tokens: int = 1 << 28) -> Tokens:
    """Each document with as many bytes of text as it has tokens, times ten."""
    writer = ShardsWriter(folder, "train", meaning, shard_tokens)
    for document in documents:
        writer.add(np.array(document, np.uint32), np.array([len(document)]), np.array([10 * len(document)]))
    return Tokens([Shard(folder / name, meaning) for name in writer.close()])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(257, "uint16"), (65535, "uint16"), (65536, "uint16"), (65537, "uint32"), (128256, "uint32"), (1 << 31, "uint32")],
)
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    document = [0, 1, vocab_size - 1]
    tokens = write(tmp_path, [document], Meaning("toy", "0123", vocab_size))
    read = tokens.read(0, 3)
    assert read.dtype == dtype and read.tolist() == document
    assert (tmp_path / "train-00000.tokens").stat().st_size == HEADER_BYTES + -(-3 * read.itemsize // 8) * 8 + 16


def test_a_long_document_keeps_its_length(tmp_path: Path) -> None:
    tokens = write(tmp_path, [[7] * 70_000, [8]])
    assert tokens.documents.tolist() == [0, 70_000] and tokens.document_bytes.tolist() == [700_000, 10]
    assert len(tokens) == 70_001


@given(
    st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), max_size=12),
    st.integers(1, 20),
    st.tuples(st.integers(0, 120), st.integers(0, 120)),
)
@settings(deadline=None, max_examples=40)
def test_any_shards_are_one_sequence(documents: list[list[int]], shard_tokens: int, between: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokens = write(Path(folder), documents, shard_tokens=shard_tokens)
        whole = list(itertools.chain(*documents))
        assert len(tokens) == len(whole)
        start, stop = sorted(min(place, len(whole)) for place in between)
        assert tokens.read(start, stop).tolist() == whole[start:stop]
        ends = [*tokens.documents.tolist()[1:], len(whole)]
        assert [whole[a:b] for a, b in zip(tokens.documents, ends, strict=False)] == documents
        assert tokens.document_bytes.tolist() == [10 * len(document) for document in documents]
        for shard in tokens.shards:
            shard.verify()
            assert shard.header.documents == 1 or shard.header.tokens <= shard_tokens


def test_outside_the_tokens_is_an_error(tmp_path: Path) -> None:
    tokens = write(tmp_path, [[1, 2, 3]])
    for start, stop in [(-1, 2), (0, 4), (2, 1)]:
        with pytest.raises(IndexError):
            tokens.read(start, stop)


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.tokens", MEANING)
    writer.add(np.array([5, 6]), np.array([2]), np.array([2]))
    with pytest.raises(BrokenShard, match=r"a\.tokens: token 3 is 300, the vocabulary has 300"):
        writer.add(np.array([5, 300]), np.array([2]), np.array([2]))
    assert not (tmp_path / "a.tokens").exists()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write(tmp_path, [[1, 2, 3, 4, 5], [6, 7, 8]])
    return tmp_path / "train-00000.tokens"


def test_an_id_outside_the_vocabulary_is_found_when_read(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES + 2 * 6 : HEADER_BYTES + 2 * 7] = (300).to_bytes(2, "little")
    shard.write_bytes(data)
    tokens = Tokens([Shard(shard, MEANING)])
    assert tokens.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(BrokenShard, match=r"train-00000\.tokens: token 6 is 300"):
        tokens.read(4, 8)


def edit_header(data: bytes, **values: object) -> bytes:
    header = json.loads(data[len(MAGIC) : HEADER_BYTES]) | values
    return (MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES) + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "bytes, by its header it should have"),
        (lambda data: data + b"\0", "bytes, by its header it should have"),
        (lambda data: data[: len(data) // 2], "fewer than a header"),
        (lambda data: data[:HEADER_BYTES], "bytes, by its header it should have"),
        (lambda data: b"", "has 0 bytes"),
        (lambda data: edit_header(data, tokens=9_000), "bytes, by its header it should have"),
        (lambda data: edit_header(data, dtype="uint32"), "its dtype is uint32, not uint16"),
        (lambda data: edit_header(data, vocab_size=301), "its vocab_size is 301, not 300"),
        (lambda data: edit_header(data, tokenizer="other"), "its tokenizer is other, not toy"),
        (lambda data: edit_header(data, fingerprint="4567"), "its fingerprint of the tokenizer is 4567"),
        (lambda data: edit_header(data, version=2), "is of format 2"),
        (lambda data: edit_header(data, more=1), "header cannot be read"),
        (lambda data: b"\0" * len(data), "is not a token shard"),
        (lambda data: data[:30] + b"\xff" + data[31:], "header cannot be read"),
    ],
)
def test_a_broken_file_is_named(shard: Path, change, said: str) -> None:
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(BrokenShard) as broken:
        Shard(shard, MEANING)
    assert str(broken.value).startswith(str(shard)) and said in str(broken.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenShard, match="no such file"):
        Shard(tmp_path / "train-00000.tokens", MEANING)


def test_a_changed_byte_is_found(shard: Path) -> None:
    Shard(shard, MEANING).verify()
    size = shard.stat().st_size
    for place in (HEADER_BYTES, HEADER_BYTES + 20, size - 1):
        whole = shard.read_bytes()
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BrokenShard, match="another hash"):
            Shard(shard, MEANING).verify()
        shard.write_bytes(whole)
