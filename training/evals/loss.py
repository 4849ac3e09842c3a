"""The losses of a task's rows on any layout: one forward-only pass, spread over the data ranks."""

from collections.abc import Callable

import numpy as np
import torch

from training.evals.task import IGNORED, Rows
from training.ranks import Ranks

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def row_nats(
    forward: Forward,
    rows: Rows,
    shape: tuple[int, int],
    ranks: Ranks,
    data_rank: int,
    data_ranks: int,
    device: torch.device | str,
) -> np.ndarray:
    """Summed loss of each row in nats, float64 [rows, 2] on every rank: of all labels, and of all but end-of-text.

    `forward(tokens, labels)`, both int64 of `shape` = [batch, width], gives the loss of each token [batch, width], 0
    where the label is ignored. Each row is scored on one data rank. Every rank makes the same number of calls of this
    one shape, with ignored rows where it has none, so that a forward that is a collective does not hang. The device is
    read once, at the end.
    """
    batch, width = shape
    calls = -(-rows.count // (batch * data_ranks))
    sums = []
    with torch.no_grad():
        for call in range(calls):
            tokens, labels = _padded(rows, (call * data_ranks + data_rank) * batch, batch, width)
            tokens, labels = tokens.to(device), labels.to(device)
            losses = forward(tokens, labels).double()
            text = torch.where(labels == rows.end_of_text, 0.0, losses)
            sums.append(torch.stack([losses.sum(1), text.sum(1)], dim=1))
    mine = torch.stack(sums).cpu().numpy()
    by_rank = dict(ranks.gather((data_rank, mine)))
    return np.stack([by_rank[rank] for rank in range(data_ranks)], axis=1).reshape(-1, 2)[: rows.count]


def _padded(rows: Rows, first: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows first .. first + batch; those past the last one, and what a row has not, are ignored."""
    first, stop = min(first, rows.count), min(first + batch, rows.count)
    tokens = np.full((batch, width), rows.end_of_text, dtype=np.int64)
    labels = np.full((batch, width), IGNORED, dtype=np.int64)
    if first < stop:
        here = slice(stop - first), slice(rows.width)
        tokens[here], labels[here] = rows.make(first, stop)
    return torch.from_numpy(tokens), torch.from_numpy(labels)
