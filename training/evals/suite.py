"""The fixed suite that scores a checkpoint."""

import torch

from training.config import EvalsConfig
from training.data.prepare import Prepared
from training.evals.continuation import Continuation
from training.evals.heldout import Heldout
from training.evals.loss import Forward, row_nats
from training.evals.task import Score, Task
from training.ranks import Ranks
from training.tokenizers import Tokenizer


class Suite:
    """Built once; the same items in the same order for the whole run, whatever the seed and the layout."""

    def __init__(
        self,
        config: EvalsConfig,
        prepared: Prepared,
        tokenizer: Tokenizer,
        sequence_length: int,
        one_shape: bool = False,
        width_multiple: int = 1,
    ) -> None:
        """`one_shape`: all tasks are scored in batches of the same shape. `width_multiple`: of the width of a batch, a
        divisor of sequence_length. `notes` says in words what could not be built as asked."""
        self.batch_sequences = config.batch_sequences
        self.one_shape = one_shape
        self.width_multiple = width_multiple
        self.tasks: list[Task] = []
        self.notes: list[str] = []
        text = prepared.heldout
        if "heldout" in config.tasks:
            heldout = Heldout(text, config.heldout_tokens, tokenizer.end_of_text, sequence_length)
            self._add(heldout)
            if heldout.count == 0:
                self.notes.append("heldout: no scores, there is no held-out text (data.heldout)")
        if "continuation" in config.tasks:
            asked = config.continuation_items
            continuation = Continuation(text, tokenizer, asked, sequence_length)
            self._add(continuation)
            found = len(continuation.items)
            if found < asked:
                self.notes.append(f"continuation: {found} items, not {asked}: too little held-out text (data.heldout)")

    def _add(self, task: Task) -> None:
        if task.rows.count > 0:
            self.tasks.append(task)

    def shapes(self, data_ranks: int) -> list[tuple[int, int]]:
        """[batch, width] in which a rank scores each task. The common shape is as wide as the widest task and has the
        batch of the task with the fewest rows, so that it needs no more memory than a task by itself."""
        multiple = self.width_multiple
        own = [
            (min(self.batch_sequences, -(-rows.count // data_ranks)), -(-rows.width // multiple) * multiple)
            for rows in (task.rows for task in self.tasks)
        ]
        if not self.one_shape or not own:
            return own
        batches, widths = zip(*own, strict=True)
        return [(min(batches), max(widths))] * len(own)

    def score(
        self, forward: Forward, ranks: Ranks, data_rank: int, data_ranks: int, device: torch.device | str
    ) -> list[Score]:
        """All scores, the same on every rank; a collective of all ranks.

        `forward` as in `row_nats`, of a model in eval mode. Ranks with the same `data_rank` score the same rows. No
        random numbers are drawn.
        """
        scores = []
        for task, shape in zip(self.tasks, self.shapes(data_ranks), strict=True):
            nats = row_nats(forward, task.rows, shape, ranks, data_rank, data_ranks, device)
            scores += task.scores(nats)
        return scores
