"""Batches: the rows of a step that this rank computes, cut into micro-batches and made ready ahead."""

import hashlib
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from models.head import IGNORED
from training.data.order import Order
from training.data.packing import packed, without_seams
from training.data.shards import Tokens
from training.resolve import rank_sequences


class BatchFailed(Exception):
    """The batch of a step could not be read; the message names the step and what was wrong with which file."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step."""

    step: int
    """Counted from 0: the steps done before it."""
    micro_batches: list[dict[str, torch.Tensor]]
    """Each {"tokens", "labels"}: int64 [micro_batch, sequence_length]; labels are the tokens one place on. With
    documents kept apart also {"documents", "positions"} of packing.packed, and seams have no label. Sequences that fill
    the step up have no labels either; where they are marked, their documents are -1."""
    predicted: int
    """Labels that count, on this rank."""
    digest: str
    """Hash of this rank's tokens, for comparing runs."""


class Batches:
    """The batches of a run as a function of the tokens consumed so far, so that a resume needs to know nothing else.

    They are the next batch_sequences samples of the order. Each rank has as many rows, whole micro-batches: the first
    rank those at the start, and the last ranks some that fill the step up where the batch does not divide."""

    def __init__(
        self,
        tokens: Tokens,
        order: Order,
        batch_sequences: int,
        micro_batch: int,
        data_rank: int,
        data_ranks: int,
        device: torch.device,
        prefetch: int,
        end_of_text: int | None = None,
        marked: bool = False,
    ) -> None:
        """micro_batch: sequences; prefetch: steps made ready ahead; end_of_text: given, documents are kept apart at it;
        marked: what fills a step up is told by its documents, for what counts tokens without their labels."""
        self.tokens = tokens
        self.order = order
        self.batch_sequences = batch_sequences
        self.micro_batch = micro_batch
        rows = rank_sequences(batch_sequences, data_ranks, micro_batch)
        self.first_row = min(data_rank * rows, batch_sequences)
        self.rows = min(rows, batch_sequences - self.first_row)
        self.filling = rows - self.rows
        self.marked = marked and rows * data_ranks > batch_sequences
        self.device = device
        self.prefetch = prefetch
        self.end_of_text = end_of_text
        self.wait_seconds = 0.0
        """Time `iterate` has made its consumer wait."""

    def at(self, step: int) -> Batch:
        """The batch of a step (from 0) of a run that always had this batch size. Raises BatchFailed."""
        return self._batch(step, self._read(step, step * self.batch_sequences))

    def iterate(self, first_step: int, tokens_consumed: int) -> Generator[Batch, None, None]:
        """The batches from a step on, before which so many tokens were consumed, without end. They begin at a whole
        sample. A thread reads ahead; it ends when the iterator is closed. Raises BatchFailed."""
        reader = ThreadPoolExecutor(1, "batches")
        ready: deque[Future[tuple[torch.Tensor, int, str]]] = deque()
        step, sample = first_step, -(-tokens_consumed // self.order.sequence_length)
        try:
            while True:
                while len(ready) <= self.prefetch:
                    ahead = len(ready)
                    ready.append(reader.submit(self._read, step + ahead, sample + ahead * self.batch_sequences))
                began = time.perf_counter()
                rows = ready.popleft().result()
                self.wait_seconds += time.perf_counter() - began
                yield self._batch(step, rows)
                step, sample = step + 1, sample + self.batch_sequences
        finally:
            reader.shutdown(cancel_futures=True)

    def _read(self, step: int, sample: int) -> tuple[torch.Tensor, int, str]:
        """This rank's rows of the step beginning at a sample, int64 [rows + filling, sequence_length + 1] on the CPU,
        pinned for a GPU; how many labels of theirs count; and their digest."""
        first = sample + self.first_row
        try:
            samples = [self._sample(int(start)) for start in self.order.starts(np.arange(first, first + self.rows))]
        except Exception as error:
            raise BatchFailed(f"step {step}: {error}") from error
        rows = np.array(samples).reshape(self.rows, self.order.sequence_length + 1)
        seams = 0 if self.end_of_text is None else int((rows[:, :-1] == self.end_of_text).sum())
        digest = hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
        tensor = torch.from_numpy(np.pad(rows.astype(np.int64), ((0, self.filling), (0, 0))))
        if self.device.type == "cuda":
            # A new thread's current device is the first one, where pinning would make a context.
            torch.cuda.set_device(self.device)
            tensor = tensor.pin_memory()
        return tensor, rows[:, 1:].size - seams, digest

    def _sample(self, start: int) -> np.ndarray:
        """sequence_length + 1 tokens from `start` on; the first token follows the last."""
        stop = start + self.order.sequence_length + 1
        parts = []
        while stop > len(self.tokens):
            parts.append(self.tokens.read(start, len(self.tokens)))
            start, stop = 0, stop - len(self.tokens)
        return np.concatenate([*parts, self.tokens.read(start, stop)])

    def _batch(self, step: int, read: tuple[torch.Tensor, int, str]) -> Batch:
        """Copies to the device in one go, on the consumer's stream: what it launches next finds the tokens there."""
        rows, predicted, digest = read
        rows = rows.to(self.device, non_blocking=True)
        inputs = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        if self.end_of_text is not None:
            inputs["labels"] = without_seams(inputs["tokens"], inputs["labels"], self.end_of_text)
            inputs |= packed(inputs["tokens"], self.end_of_text)
        elif self.marked:
            inputs["documents"] = torch.zeros_like(inputs["tokens"])
        inputs["labels"][self.rows :] = IGNORED
        if self.marked:
            inputs["documents"][self.rows :] = -1
        cut = {name: tensor.split(self.micro_batch) for name, tensor in inputs.items()}
        micro_batches = [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]
        return Batch(step, micro_batches, predicted, digest)
