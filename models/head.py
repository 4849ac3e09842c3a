"""The residual stream to token losses."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.roles import Role, Spec, specify

IGNORED = -100  # a label that is not predicted and not counted

Reduction = Literal["sum", "none"]


class Head(nn.Module):
    """Scores of every token of the vocabulary and, given labels, their cross-entropy. Padding rows of the weight are
    cut from the scores, so they are never predicted, take no part in the softmax and get no gradient."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.dim))
        specify(self, weight=Spec(Role.head, config.init_std, rows=config.vocab_size))

    def forward(self, x: Tensor, labels: Tensor | None, reduction: Reduction) -> Tensor:
        """x: [batch, seq, dim]; labels: [batch, seq]. Returns logits [batch, seq, vocabulary] without labels; with them
        the summed loss of shape (1,), or each token's [batch, seq], in nats and in float32 or wider."""
        logits = F.linear(x, self.weight)[..., : self.vocab_size]
        if labels is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        # Not a view of the losses: FSDP2 hooks into what the root returns.
        return losses.sum(0, keepdim=True) if reduction == "sum" else losses.view_as(labels).clone()
