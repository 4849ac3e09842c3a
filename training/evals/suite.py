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

    def __init__(self, config: EvalsConfig, prepared: Prepared, tokenizer: Tokenizer, sequence_length: int) -> None:
        """`notes` says in words what could not be built as asked."""
        self.batch_sequences = config.batch_sequences
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

    def score(
        self, forward: Forward, ranks: Ranks, data_rank: int, data_ranks: int, device: torch.device | str
    ) -> list[Score]:
        """All scores, the same on every rank; a collective of all ranks.

        `forward` as in `row_nats`, of a model in eval mode. Ranks with the same `data_rank` score the same rows. No
        random numbers are drawn.
        """
        scores = []
        for task in self.tasks:
            nats = row_nats(forward, task.rows, self.batch_sequences, ranks, data_rank, data_ranks, device)
            scores += task.scores(nats)
        return scores
