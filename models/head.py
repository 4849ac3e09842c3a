"""The residual stream to token losses."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.roles import Role, Spec, specify
from models.softcap import softcapped

IGNORED = -100  # a label that is not predicted and not counted

Reduction = Literal["sum", "none"]


class TokenLoss(nn.Module):
    """Scores over the vocabulary to token losses, a child without parameters. What cuts the vocabulary, such as tensor
    parallelism, replaces it.

    Padding rows of the head are cut from the scores, so they are never predicted, take no part in the softmax and get
    no gradient."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.softcap = config.logit_softcap
        self.z_loss = config.z_loss

    def forward(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """scores: [batch, seq, rows of the head]; labels: [batch, seq]. Returns logits [batch, seq, vocabulary] without
        labels; with them each token's cross-entropy [batch, seq] in nats, in float32 or wider.

        The gradient is that of the cross-entropy plus z_loss x logsumexp^2 (Chowdhery et al. 2022, PaLM, 5)."""
        logits = scores[..., : self.vocab_size]
        if labels is None:
            return softcapped(logits, self.softcap)
        logits = softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.softcap)
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = losses.view_as(labels)
        if self.z_loss > 0:
            extra = self.z_loss * logits.logsumexp(-1).square() * (labels != IGNORED)
            losses = losses + (extra - extra.detach())
        return losses


class Head(nn.Module):
    """Scores of every token of the vocabulary and, given labels, their loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.dim))
        role = Role.embedding if config.tied_head else Role.head
        std = config.embedding_std if config.tied_head else config.init_std
        specify(self, weight=Spec(role, std, rows=config.vocab_size))
        self.width = config.width
        self.loss: nn.Module = TokenLoss(config)

    def forward(self, x: Tensor, labels: Tensor | None, reduction: Reduction) -> Tensor:
        """x: [batch, seq, dim]; labels: [batch, seq]. Returns logits [batch, seq, vocabulary] without labels; with them
        the summed loss of shape (1,), or each token's [batch, seq]."""
        x = x if self.width == 1 else x / self.width  # Yang et al. 2022, table 8
        found = self.loss(F.linear(x, self.weight), labels)
        if labels is None:
            return found
        # Not a view of the losses: FSDP2 hooks into what the root returns.
        return found.flatten().sum(0, keepdim=True) if reduction == "sum" else found.clone()
