"""Token shards: tokens with the places and sizes of their documents, in files that say what they are.

A file is a header of 1024 bytes (magic, then JSON padded with spaces), the tokens (little-endian uint16 or uint32,
padded to a multiple of eight bytes), the start of each document (int64, counted from the shard's first token), and the
bytes of each document's text (int64). Each document ends with the end-of-text token."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

MAGIC = b"ESPALIER TOKENS\n"
VERSION = 1
HEADER_BYTES = 1024
# A new shard begins with the document that would make it larger than this.
SHARD_TOKENS = 1 << 28
WRITE_BYTES = 1 << 20


class BrokenShard(Exception):
    """A token file that is not what it should be. The message begins with its path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class Meaning:
    """What the numbers in a shard mean: the tokenizer that made them."""

    tokenizer: str
    fingerprint: str
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Header:
    version: int
    dtype: str
    vocab_size: int
    tokenizer: str
    fingerprint: str
    tokens: int
    documents: int
    sha256: str
    """Of everything after the header."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens with their padding."""
        return -(-self.tokens * np.dtype(self.dtype).itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.token_bytes + 16 * self.documents


class ShardWriter:
    """Writes one shard; the file has its name only once `close` has returned."""

    def __init__(self, path: Path, meaning: Meaning) -> None:
        self.path = path
        self.meaning = meaning
        self.tokens = 0
        self._starts: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self._digest = hashlib.sha256()
        self._beside = path.with_name(f".{path.name}.tmp")
        self._file = open(self._beside, "wb", buffering=WRITE_BYTES)  # noqa: SIM115
        self._file.write(b"\0" * HEADER_BYTES)

    def add(self, ids: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray) -> None:
        """Adds documents.

        ids: [sum of lengths] the tokens of all of them, each with its end_of_text; lengths: [documents] tokens of each;
        text_bytes: [documents] bytes of each text. Raises BrokenShard if an id is not in the vocabulary."""
        assert len(ids) == lengths.sum() and len(lengths) == len(text_bytes)
        if len(ids) and int(ids.max()) >= self.meaning.vocab_size:
            raise BrokenShard(self.path, _outside(ids, self.tokens, self.meaning.vocab_size))
        self._write(ids.astype(self.meaning.dtype).tobytes())
        self._starts.append(self.tokens + np.cumsum(lengths, dtype="<i8") - lengths)
        self._bytes.append(text_bytes.astype("<i8"))
        self.tokens += len(ids)

    def close(self) -> Header:
        """Completes the file and gives it its name."""
        starts = np.concatenate([np.empty(0, "<i8"), *self._starts])
        sizes = np.concatenate([np.empty(0, "<i8"), *self._bytes])
        self._write(b"\0" * (-self.tokens * self.meaning.dtype.itemsize % 8))
        self._write(starts.tobytes())
        self._write(sizes.tobytes())
        header = Header(
            version=VERSION,
            dtype=self.meaning.dtype.name,
            vocab_size=self.meaning.vocab_size,
            tokenizer=self.meaning.tokenizer,
            fingerprint=self.meaning.fingerprint,
            tokens=self.tokens,
            documents=len(starts),
            sha256=self._digest.hexdigest(),
        )
        self._file.seek(0)
        self._file.write((MAGIC + json.dumps(asdict(header)).encode()).ljust(HEADER_BYTES - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._beside, self.path)
        return header

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)


class ShardsWriter:
    """Writes documents into as many shards as they need: `<name>-00000.tokens`, ..."""

    def __init__(self, folder: Path, name: str, meaning: Meaning, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.name = name
        self.meaning = meaning
        self.shard_tokens = shard_tokens
        self.headers: dict[str, Header] = {}
        """Complete shards by file name."""
        self._shard: ShardWriter | None = None

    def add(self, ids: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray) -> None:
        """As ShardWriter.add; the documents added together stay in one shard."""
        if not len(lengths):
            return
        if self._shard is not None and self._shard.tokens + len(ids) > self.shard_tokens:
            self._end_shard()
        if self._shard is None:
            self._shard = ShardWriter(self.folder / f"{self.name}-{len(self.headers):05d}.tokens", self.meaning)
        self._shard.add(ids, lengths, text_bytes)

    def close(self) -> dict[str, Header]:
        self._end_shard()
        return self.headers

    def _end_shard(self) -> None:
        if self._shard is not None:
            self.headers[self._shard.path.name] = self._shard.close()
            self._shard = None


class Shard:
    """A shard that is read, memory-mapped."""

    def __init__(self, path: Path, meaning: Meaning) -> None:
        """Raises BrokenShard if the file is not a whole shard of this meaning. The tokens are not looked at."""
        self.path = path
        self.header = header = _read_header(path)
        for what, has, wanted in [
            ("tokenizer", header.tokenizer, meaning.tokenizer),
            ("fingerprint of the tokenizer", header.fingerprint, meaning.fingerprint),
            ("vocab_size", header.vocab_size, meaning.vocab_size),
            ("dtype", header.dtype, meaning.dtype.name),
        ]:
            if has != wanted:
                raise BrokenShard(path, f"its {what} is {has}, not {wanted}")
        size = path.stat().st_size
        if size != header.file_bytes:
            raise BrokenShard(path, f"has {size} bytes, by its header it should have {header.file_bytes}")
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        after_tokens = HEADER_BYTES + header.token_bytes
        after_starts = after_tokens + 8 * header.documents
        self.tokens: np.ndarray = data[HEADER_BYTES:after_tokens].view(meaning.dtype)[: header.tokens]
        self.starts: np.ndarray = data[after_tokens:after_starts].view("<i8")
        self.text_bytes: np.ndarray = data[after_starts:].view("<i8")
        self._payload = data[HEADER_BYTES:]

    def verify(self) -> None:
        """Reads the whole file and raises BrokenShard if it is not what was written."""
        if hashlib.sha256(self._payload.data).hexdigest() != self.header.sha256:
            raise BrokenShard(self.path, "its content has another hash than its header says")


class Tokens:
    """The tokens of several shards as one sequence."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)
        self._ends = np.cumsum([0, *(shard.header.tokens for shard in self.shards)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop (without stop), [stop - start], in the dtype of the shards.

        Raises IndexError outside the tokens, BrokenShard (with file and place) if an id is not in the vocabulary."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        parts = []
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        for shard, begin in zip(self.shards[first:], self._ends[first:-1], strict=True):
            if begin >= stop:
                break
            at = max(start - int(begin), 0)
            part = shard.tokens[at : stop - int(begin)]
            if len(part) and int(part.max()) >= shard.header.vocab_size:
                raise BrokenShard(shard.path, _outside(part, at, shard.header.vocab_size))
            parts.append(part)
        return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    @cached_property
    def documents(self) -> np.ndarray:
        """[documents] int64: the first token of each."""
        parts = [shard.starts + begin for shard, begin in zip(self.shards, self._ends[:-1], strict=True)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    @cached_property
    def document_bytes(self) -> np.ndarray:
        """[documents] int64: bytes of the UTF-8 of each one's text, as it was before it was tokenized."""
        return np.concatenate([np.empty(0, np.int64), *(shard.text_bytes for shard in self.shards)])


def _outside(ids: np.ndarray, offset: int, vocab_size: int) -> str:
    at = int(np.argmax(ids >= vocab_size))
    return f"token {offset + at} is {int(ids[at])}, the vocabulary has {vocab_size}"


def _read_header(path: Path) -> Header:
    if not path.is_file():
        raise BrokenShard(path, "there is no such file")
    with open(path, "rb") as file:
        data = file.read(HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise BrokenShard(path, f"has {len(data)} bytes, fewer than a header")
    if not data.startswith(MAGIC):
        raise BrokenShard(path, "is not a token shard")
    try:
        values = json.loads(data[len(MAGIC) :])
        version = values["version"]
        header = Header(**values) if version == VERSION else None
    except (ValueError, TypeError, KeyError):
        raise BrokenShard(path, "its header cannot be read") from None
    if header is None:
        raise BrokenShard(path, f"is of format {version}, this version reads {VERSION}")
    return header
