"""The documents in the files of a corpus."""

import ast
import difflib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from training.data.corpus import Kind, Source, unreadable
from training.refusal import Problem

if TYPE_CHECKING:
    import pyarrow.parquet

# Text handed over at once; a larger document is handed over whole.
BLOCK_BYTES = 8 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """A part of the corpus that one process works on."""

    kind: Kind
    contents: list[bytes]
    """Whole files, or lines of one. Empty for parquet, which is read where it is worked on."""
    path: Path
    """Of the file (the last one where there are several)."""
    row_group: int
    """parquet: which."""
    source_bytes: int
    """Bytes of the files that were read for it, for progress."""


@dataclass(frozen=True)
class Skipped:
    """Something that gave no document."""

    reason: str


# The text in UTF-8, or why there is none.
Document = bytes | Skipped

EMPTY = Skipped("empty")
NOT_UTF8 = Skipped("not UTF-8")
NOT_JSON = Skipped("not a JSON object")
NO_FIELD = Skipped("without the field")
NOT_TEXT = Skipped("field is not text")
NOT_UNICODE = Skipped("half of a surrogate pair")


def field_problems(listed: list[Source], field: str) -> list[Problem]:
    """Files that have no such field, by their schema or first line. Raises Refusal for a file that cannot be read."""
    problems = []
    for source in listed:
        fields = _fields(source)
        if fields is not None and field not in fields:
            near = difflib.get_close_matches(field, fields, 1) or fields[:1] or ["<field>"]
            reason = f"{source.path} has no such field; it has {', '.join(fields) or 'none'}"
            problems.append(Problem("data.field", field, reason, f"data.field={near[0]}"))
    return problems


def _fields(source: Source) -> list[str] | None:
    """Names of the fields; None where there are no fields or they cannot be told."""
    if source.kind is Kind.parquet:
        with _parquet(source.path) as table:
            return list(table.schema_arrow.names)
    if source.kind is Kind.jsonl:
        with _opened(source) as (file, _):
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError:
            return None
        return [str(name) for name in row] if isinstance(row, dict) else None
    return None


def blocks(listed: list[Source]) -> Iterator[Block]:
    """The corpus in parts of about BLOCK_BYTES, in its order. Raises Refusal for a file that cannot be read."""
    for kind, group in itertools.groupby(listed, key=lambda source: source.kind):
        if kind is Kind.text:
            yield from _text_blocks(group)
            continue
        for source in group:
            if kind is Kind.jsonl:
                yield from _line_blocks(source)
            elif kind is Kind.parquet:
                yield from _row_blocks(source)
            else:
                yield Block(kind, [source.path.read_bytes()], source.path, 0, source.size)


def _text_blocks(listed: Iterable[Source]) -> Iterator[Block]:
    contents: list[bytes] = []
    text_bytes = file_bytes = 0
    for source in listed:
        with _opened(source) as (file, _):
            contents.append(file.read())
        text_bytes += len(contents[-1])
        file_bytes += source.size
        if text_bytes >= BLOCK_BYTES:
            yield Block(Kind.text, contents, source.path, 0, file_bytes)
            contents, text_bytes, file_bytes = [], 0, 0
    if contents:
        yield Block(Kind.text, contents, source.path, 0, file_bytes)


def _line_blocks(source: Source) -> Iterator[Block]:
    with _opened(source) as (file, packed):
        place = 0
        while lines := file.read(BLOCK_BYTES):
            lines += file.readline()
            if place == 0:
                lines = lines.removeprefix(BYTE_ORDER_MARK)
            before, place = place, packed.tell()
            yield Block(Kind.jsonl, [lines], source.path, 0, place - before)


def _row_blocks(source: Source) -> Iterator[Block]:
    with _parquet(source.path) as table:
        groups = table.num_row_groups
    for group in range(groups):
        yield Block(Kind.parquet, [], source.path, group, source.size // groups)


def documents(block: Block, field: str) -> Iterator[Document]:
    """The documents of a block in their order. Raises Refusal for a parquet file that cannot be read."""
    readers: dict[Kind, Callable[[Block, str], Iterator[Document]]] = {
        Kind.text: _text_documents,
        Kind.topics: _topic_documents,
        Kind.jsonl: _line_documents,
        Kind.parquet: _row_documents,
    }
    return readers[block.kind](block, field)


def _text_documents(block: Block, field: str) -> Iterator[Document]:
    for content in block.contents:
        try:
            content.decode()
        except UnicodeDecodeError:
            yield NOT_UTF8
        else:
            yield content.removeprefix(BYTE_ORDER_MARK) or EMPTY


def _topic_documents(block: Block, field: str) -> Iterator[Document]:
    """The file is one assignment of a dictionary of texts; its quotes and escapes are not documentation."""
    for content in block.contents:
        assignment = ast.parse(content).body[-1]
        assert isinstance(assignment, ast.Assign)
        for _, text in sorted(ast.literal_eval(assignment.value).items()):
            yield _encoded(text)


def _line_documents(block: Block, field: str) -> Iterator[Document]:
    for content in block.contents:
        for line in content.split(b"\n"):
            if line.strip():
                yield _line_document(line, field)


def _line_document(line: bytes, field: str) -> Document:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return NOT_UTF8
    except (ValueError, RecursionError):
        return NOT_JSON
    if not isinstance(row, dict):
        return NOT_JSON
    return _encoded(row[field]) if field in row else NO_FIELD


def _row_documents(block: Block, field: str) -> Iterator[Document]:
    with _parquet(block.path) as table:
        for batch in table.iter_batches(row_groups=[block.row_group], columns=[field]):
            for text in batch.column(0).to_pylist():
                yield _encoded(text)


def _encoded(text: object) -> Document:
    if not isinstance(text, str):
        return NOT_TEXT
    try:
        return text.encode() or EMPTY
    except UnicodeEncodeError:
        return NOT_UNICODE


@contextmanager
def _opened(source: Source) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content unpacked, and the file itself, whose place tells how far it is read.

    Raises Refusal if it cannot be read or unpacked to its end."""
    try:
        with open(source.path, "rb") as file:
            if source.packed == "gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=file)), file
            elif source.packed == "zst":
                yield io.BufferedReader(_Unzstd(file), BLOCK_BYTES), file
            else:
                yield file, file
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(source.path, error) from None


class _Unzstd(io.RawIOBase):
    """Unpacks zstd. The library's own reader takes the end of a truncated file for the end of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self.error = zstandard.ZstdError
        self.new_frame = zstandard.ZstdDecompressor().decompressobj
        self.frame = self.new_frame()
        self.file = file
        self.ready = memoryview(b"")
        self.whole = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.frame.unused_data or self.file.read(BLOCK_BYTES)
            if not packed:
                if not self.whole:
                    raise EOFError("the file ended before its content")
                return 0
            if self.frame.eof:
                self.frame = self.new_frame()
            try:
                self.ready = memoryview(self.frame.decompress(packed))
            except self.error as error:
                raise OSError(str(error)) from None
            self.whole = self.frame.eof
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


@contextmanager
def _parquet(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield table
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(path, error) from None
