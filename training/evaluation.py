"""The suite, run on the model as it is now."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel.apply import Spread
from parallel.mesh import data_coordinate
from training.data.packing import packed
from training.evals.suite import Suite
from training.metrics.records import Record
from training.ranks import Ranks


@dataclass
class Evaluation:
    """Scores the model; changes nothing in it. With `end_of_text` it sees documents apart, as in training, and their
    first tokens count all the same. `interrupt` is called before each batch and may raise to end the
    evaluation, on all ranks at the same batch."""

    suite: Suite
    spread: Spread
    mesh: DeviceMesh | None
    ranks: Ranks
    device: torch.device
    interrupt: Callable[[], None]
    end_of_text: int | None = None

    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.interrupt()
        apart = {} if self.end_of_text is None else packed(tokens, self.end_of_text)
        return self.spread.forward(tokens=tokens, labels=labels, reduction="none", **apart)

    def score(self, step: int) -> list[Record]:
        """A collective: all scores of the suite, the same on every rank, as lines of evals.jsonl."""
        data_rank, data_ranks = data_coordinate(self.mesh, self.spread.sequence_ranks)
        self.spread.model.eval()
        try:
            scores = self.suite.score(self.losses, self.ranks, data_rank, data_ranks, self.device)
        finally:
            self.spread.model.train()
        return [{"step": step} | asdict(score) for score in scores]
