"""Documents to tokens: split into training and held-out text, cut, and tokenized, by one process or several."""

import hashlib
import itertools
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from training.data.documents import Block, Skipped, documents
from training.refusal import Problem, Refusal
from training.tokenizers import Tokenizer

# A held-out piece has at most this many bytes of text.
PIECE_BYTES = 16384


@dataclass(frozen=True)
class Work:
    """What is done with each block."""

    tokenizer: Tokenizer
    field: str
    heldout: float
    tails: bool
    """See `split`."""


@dataclass
class Texts:
    """Tokenized texts one after the other, each with its end_of_text."""

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray


@dataclass
class Encoded:
    """What became of a block."""

    train: Texts
    heldout: Texts
    keys: np.ndarray
    """By which the held-out pieces are sorted."""
    heldout_documents: int
    skipped: Counter[str]


def encode(work: Work, block: Block) -> Encoded:
    """Reads, splits and tokenizes a block."""
    train: list[bytes] = []
    heldout: list[bytes] = []
    heldout_documents = 0
    skipped: Counter[str] = Counter()
    for document in documents(block, work.field):
        if isinstance(document, Skipped):
            skipped[document.reason] += 1
            continue
        for_training, held_out = split(document, work.heldout, work.tails)
        if for_training:
            train.append(for_training)
        if held_out:
            heldout.extend(pieces(held_out))
            heldout_documents += 1
    keys = np.array([_hash(piece, b"order") for piece in heldout], np.uint64)
    return Encoded(_texts(work.tokenizer, train), _texts(work.tokenizer, heldout), keys, heldout_documents, skipped)


def _texts(tokenizer: Tokenizer, texts: list[bytes]) -> Texts:
    end = np.array([tokenizer.end_of_text], np.uint32)
    encoded = tokenizer.encode_batch([text.decode() for text in texts])
    parts = itertools.chain.from_iterable((ids, end) for ids in encoded)
    ids = np.concatenate([np.empty(0, np.uint32), *parts], dtype=np.uint32)
    lengths = np.array([len(ids) + 1 for ids in encoded], np.int64)
    return Texts(ids, lengths, np.array([len(text) for text in texts], np.int64))


def split(document: bytes, heldout: float, tails: bool) -> tuple[bytes, bytes]:
    """The text for training and the text held out.

    The document is on one side, by its hash, so that its copies are on the same; with `tails` its last share is held
    out, from the beginning of a line where one is near."""
    if not tails:
        return (b"", document) if _hash(document, b"split") < heldout * 2.0**64 else (document, b"")
    at = round(len(document) * (1 - heldout))
    at = document.rfind(b"\n", at * 9 // 10, at) + 1 or _character(document, at)
    return document[:at], document[at:]


def pieces(text: bytes) -> list[bytes]:
    """The text cut between characters into parts of nearly the same size, at most PIECE_BYTES."""
    count = -(-len(text) // (PIECE_BYTES - 3))
    cuts = [_character(text, len(text) * n // count) for n in range(count)] + [len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(cuts)]


def _character(text: bytes, at: int) -> int:
    """The nearest place not after `at` where a character of the UTF-8 text begins."""
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _hash(text: bytes, purpose: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=purpose).digest(), "little")


def encode_all(
    work: Work, blocks: Iterable[Block], workers: int
) -> Generator[tuple[Block, Encoded | list[Problem]], None, None]:
    """Each block with what became of it (or why it cannot be read), in order.

    More than one worker are processes, which have a few blocks waiting for each."""
    if workers == 1:
        for block in blocks:
            yield block, encode(work, block)
        return
    import multiprocessing

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (work,))
    waiting: deque[tuple[Block, Future[Encoded | list[Problem]]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, pool.submit(_encode_in_worker, block)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_work: Work


def _start_worker(work: Work) -> None:
    """Ctrl-C is the parent's; the worker ends when the parent does, in whatever way."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block) -> Encoded | list[Problem]:
    try:
        return encode(_work, block)
    except Refusal as refusal:
        return refusal.problems
