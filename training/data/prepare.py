"""Text to token shards, once: kept in a cache by the hash of the text, however many processes ask at once."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from training.config import DataConfig, DataKind
from training.data import corpus
from training.data.corpus import Source
from training.data.documents import BLOCK_BYTES, blocks, field_problems
from training.data.encoding import PIECE_BYTES, Texts, Work, encode_all
from training.data.shards import BrokenShard, Header, Meaning, Shard, ShardsWriter, Tokens
from training.files import write_json
from training.refusal import Problem, Refusal
from training.tokenizers import Tokenizer

# Of the whole result: it changes when the same text and tokenizer would give other shards.
FORMAT = 1
# Starting processes costs about a second each; with less text than this one process is faster.
PARALLEL_BYTES = 48 << 20
# Shards of at most this size are read whole and compared with their hash at each start.
VERIFY_BYTES = 64 << 20
# The manifest lists the sources one by one up to this many.
LISTED_SOURCES = 2000
# Hashes of files from this size on are remembered.
REMEMBER_BYTES = 16 << 20

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """The corpus as tokens."""

    folder: Path
    train: Tokens
    """Documents whole, in the order of the corpus."""
    heldout: Tokens
    """Pieces of at most PIECE_BYTES, in the order of their hashes: the first n tokens stand for all."""
    manifest: dict[str, Any]


def prepare(config: DataConfig, tokenizer: Tokenizer, show: Show | None = None) -> Prepared:
    """The tokens of the corpus, from the cache if it has them.

    Any number of processes may call this at once, on hosts that share the cache too: one works, the others wait.
    `show(what, done, total)` is told the progress in bytes of the files. With more than PARALLEL_BYTES of text, this
    spawns processes, so the main module must be importable. Raises Refusal naming keys of `data`, also for a broken
    cache."""
    show = show or (lambda what, done, total: None)
    listed = corpus.sources(config)
    cache = Path(config.cache or os.environ.get("ESPALIER_CACHE") or "~/.cache/espalier").expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        hashes = _hashes(listed, cache, show)
        folder = cache / _name(config, tokenizer, listed, hashes)
        if not folder.is_dir():
            with _locked(folder.with_name(f"{folder.name}.lock"), show) as locked:
                if locked:
                    for leftover in cache.glob(f"{folder.name}.*.tmp"):
                        shutil.rmtree(leftover)
                if not folder.is_dir():
                    _make(config, tokenizer, listed, hashes, folder, show)
    except OSError as error:
        problem = Problem("data.cache", cache, f"cannot be used: {error}", "data.cache=<a folder with room>")
        raise Refusal([problem]) from None
    return _open(folder, tokenizer, listed, hashes)


def _name(config: DataConfig, tokenizer: Tokenizer, listed: list[Source], hashes: list[str]) -> str:
    """Of the folder in the cache: a hash of all that decides its content."""
    content = [(source.kind.value, source.packed, digest) for source, digest in zip(listed, hashes, strict=True)]
    decides = [FORMAT, PIECE_BYTES, content, config.field, config.heldout, tokenizer.name, tokenizer.fingerprint]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    return f"{config.kind.value}-{tokenizer.name}-{digest[:24]}"


def _hashes(listed: list[Source], cache: Path, show: Show) -> list[str]:
    """sha256 of each source. Those of large files are remembered in the cache by path, size and time of change."""
    large = [source for source in listed if source.size >= REMEMBER_BYTES]
    memory = cache / "hashes.json"
    known = _remembered(memory, large)
    if len(known) < len(large):
        with _locked(memory.with_suffix(".lock"), show):
            known = _remembered(memory, large)
            done, total = 0, sum(source.size for source in large)
            for source in large:
                if source.path not in known:
                    show("hashing", done, total)
                    known[source.path] = corpus.sha256(source)
                done += source.size
            # A file changed within the last seconds could change again and keep its time.
            settled = [source for source in large if time.time_ns() - source.changed > 10_000_000_000]
            entries = {str(s.path.absolute()): [s.size, s.changed, known[s.path]] for s in settled}
            write_json(memory, (json.loads(memory.read_text()) if memory.is_file() else {}) | entries)
    return [known.get(source.path) or corpus.sha256(source) for source in listed]


def _remembered(memory: Path, large: list[Source]) -> dict[Path, str]:
    known = json.loads(memory.read_text()) if large and memory.is_file() else {}
    entries = [(source, known.get(str(source.path.absolute()))) for source in large]
    return {source.path: entry[2] for source, entry in entries if entry and entry[:2] == [source.size, source.changed]}


@contextmanager
def _locked(path: Path, show: Show) -> Iterator[bool]:
    """Waits for the lock, which goes with the process that holds it, however that ends.

    Gives False where the file system has no locks: several processes may then do the same work, and the first to finish
    gives the result."""
    with open(path, "a") as file:
        while (locked := _lock(file)) is None:
            show("waiting for another process that prepares the data", 0, 0)
            time.sleep(0.1)
        yield locked


def _lock(file: IO[str]) -> bool | None:
    """True: we have the lock. None: another has it. False: the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


@dataclass
class Made:
    """What was written."""

    tails: bool
    train: dict[str, Header] = field(default_factory=dict)
    heldout: dict[str, Header] = field(default_factory=dict)
    documents: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


def _make(
    config: DataConfig, tokenizer: Tokenizer, listed: list[Source], hashes: list[str], folder: Path, show: Show
) -> None:
    """Makes the folder beside its place and renames it."""
    if problems := field_problems(listed, config.field):
        raise Refusal(problems)
    beside = folder.with_name(f"{folder.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    try:
        beside.mkdir()
        made = _tokenize(config, tokenizer, listed, beside, show, tails=False)
        if config.heldout and bool(made.train) != bool(made.heldout):
            # Too few documents to keep some of them whole: keep the end of each.
            shutil.rmtree(beside)
            beside.mkdir()
            made = _tokenize(config, tokenizer, listed, beside, show, tails=True)
        if problem := _made_problem(config, made):
            raise Refusal([problem])
        if changed := [source.path for source in listed if not corpus.unchanged(source)]:
            reason, instead = "changed while it was read", "start again when it is complete"
            raise Refusal([Problem("data.files", path, reason, instead) for path in changed])
        write_json(beside / "manifest.json", _manifest(config, tokenizer, made) | _sources(listed, hashes))
        try:
            beside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _made_problem(config: DataConfig, made: Made) -> Problem | None:
    if not (made.train or made.heldout):
        counts = ", ".join(f"{count} {reason}" for reason, count in made.skipped.most_common()) or "no documents"
        files = "stdlib" if config.kind is DataKind.stdlib else config.files
        return Problem("data.files", files, f"there is no text in them ({counts})", "files with text")
    if not made.train or (config.heldout and not made.heldout):
        reason = f"{sum(made.text_bytes.values())} bytes of text are too few to hold out a share"
        return Problem("data.heldout", config.heldout, reason, "data.heldout=0, or more text")
    return None


def _tokenize(
    config: DataConfig, tokenizer: Tokenizer, listed: list[Source], folder: Path, show: Show, tails: bool
) -> Made:
    made = Made(tails)
    meaning = Meaning(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
    train = ShardsWriter(folder, "train", meaning)
    unsorted = ShardsWriter(folder, "unsorted", meaning)
    keys = [np.empty(0, np.uint64)]
    done, total = 0, sum(source.size for source in listed)
    workers = min(config.workers or _cores(), -(-total // BLOCK_BYTES)) if total > PARALLEL_BYTES else 1
    show("tokenizing", 0, total)
    work = Work(tokenizer, config.field, config.heldout, tails)
    with closing(encode_all(work, blocks(listed), workers)) as results:
        for block, encoded in results:
            if isinstance(encoded, list):
                raise Refusal(encoded)
            _add(train, encoded.train)
            _add(unsorted, encoded.heldout)
            keys.append(encoded.keys)
            made.documents += Counter(train=len(encoded.train.lengths), heldout=encoded.heldout_documents)
            sizes = encoded.train.text_bytes.sum(), encoded.heldout.text_bytes.sum()
            made.text_bytes += Counter(train=int(sizes[0]), heldout=int(sizes[1]))
            made.skipped += encoded.skipped
            done += block.source_bytes
            show("tokenizing", done, total)
    made.train = train.close()
    made.heldout = _sort(folder, unsorted.close(), np.concatenate(keys), meaning)
    return made


def _add(writer: ShardsWriter, texts: Texts) -> None:
    writer.add(texts.ids, texts.lengths, texts.text_bytes)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sort(folder: Path, unsorted: dict[str, Header], keys: np.ndarray, meaning: Meaning) -> dict[str, Header]:
    """Rewrites the held-out pieces in the order of their keys."""
    tokens = Tokens([Shard(folder / name, meaning) for name in unsorted])
    starts, sizes = tokens.documents, tokens.document_bytes
    lengths = np.diff(starts, append=len(tokens))
    writer = ShardsWriter(folder, "heldout", meaning)
    for piece in np.argsort(keys, kind="stable"):
        ids = tokens.read(int(starts[piece]), int(starts[piece] + lengths[piece]))
        writer.add(ids, lengths[piece : piece + 1], sizes[piece : piece + 1])
    for name in unsorted:
        (folder / name).unlink()
    return writer.close()


def _manifest(config: DataConfig, tokenizer: Tokenizer, made: Made) -> dict[str, Any]:
    sides = {"train": made.train, "heldout": made.heldout}
    made_with = {
        "name": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }
    return {
        "format": FORMAT,
        "kind": config.kind.value,
        "tokenizer": made_with,
        "heldout_share": config.heldout,
        "split": "end of each document" if made.tails else "by document",
        "documents": {side: made.documents[side] for side in sides},
        "tokens": {side: sum(header.tokens for header in shards.values()) for side, shards in sides.items()},
        "bytes": {side: made.text_bytes[side] for side in sides},
        "skipped": dict(made.skipped),
        "shards": {side: {name: h.sha256 for name, h in shards.items()} for side, shards in sides.items()},
    }


def _sources(listed: list[Source], hashes: list[str]) -> dict[str, Any]:
    total = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    entry: dict[str, Any] = {"files": len(listed), "bytes": sum(s.size for s in listed), "sha256_of_hashes": total}
    if len(listed) <= LISTED_SOURCES:
        each = zip(listed, hashes, strict=True)
        entry["each"] = [{"name": source.name, "bytes": source.size, "sha256": digest} for source, digest in each]
    return {"sources": entry}


def _open(folder: Path, tokenizer: Tokenizer, listed: list[Source], hashes: list[str]) -> Prepared:
    try:
        manifest = _read_manifest(folder / "manifest.json")
        meaning = Meaning(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
        sides = {
            side: Tokens([_open_shard(folder / name, meaning, sha256) for name, sha256 in shards.items()])
            for side, shards in manifest["shards"].items()
        }
    except BrokenShard as broken:
        instead = f"delete {folder}; it is then made again"
        raise Refusal([Problem("data.cache", broken.path, broken.reason, instead)]) from None
    # The same content may have come from files of other names when the shards were made.
    return Prepared(folder, sides["train"], sides["heldout"], manifest | _sources(listed, hashes))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BrokenShard(path, "there is no such file")
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise BrokenShard(path, "is not JSON") from None


def _open_shard(path: Path, meaning: Meaning, sha256: str) -> Shard:
    shard = Shard(path, meaning)
    if shard.header.sha256 != sha256:
        raise BrokenShard(path, "is not the file that manifest.json names")
    if shard.header.file_bytes <= VERIFY_BYTES:
        shard.verify()
    return shard
