"""Sequences of several documents, each of which ends with its end-of-text token (training.data.shards)."""

import torch
from torch import Tensor

from models.head import IGNORED


def packed(tokens: Tensor, end_of_text: int) -> dict[str, Tensor]:
    """The inputs of Decoder.forward that keep documents apart, of tokens [batch, seq]. documents: the number of each
    token's document in its sequence; positions count from the document's first token there. int64 [batch, seq]."""
    ends = tokens == end_of_text
    documents = ends.cumsum(1) - ends.long()
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    first = torch.where(begins, places, 0).cummax(1).values
    return {"documents": documents, "positions": places - first}


def without_seams(tokens: Tensor, labels: Tensor, end_of_text: int) -> Tensor:
    """Labels without those of end-of-text tokens, which are the first tokens of the next documents."""
    return labels.masked_fill(tokens == end_of_text, IGNORED)
