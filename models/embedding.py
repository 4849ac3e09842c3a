"""Tokens and positions to vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, Position
from models.roles import Role, Spec, specify


def table(rows: int, dim: int) -> nn.Embedding:
    """An embedding without first values: drawing them on the meta device costs seconds of imports."""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


class ValueEmbedding(nn.Module):
    """A token's vector for the values of attention (Jordan et al. 2024, modded-nanogpt; after Zhou et al. 2024, Value
    Residual Learning)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = table(config.padded_vocab_size, config.key_value_dim)
        specify(self.table, weight=Spec(Role.embedding, config.embedding_std, rows=config.vocab_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, seq]. Returns [batch, seq, width of the values here]."""
        vectors: Tensor = self.table(tokens)
        return vectors


class Embedding(nn.Module):
    """A token's vector, with learned positions the sum of that and its position's. The token table is padded below the
    vocabulary with rows of zeros."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        tokens = table(config.padded_vocab_size, config.dim)
        self.tokens = specify(tokens, weight=Spec(Role.embedding, config.embedding_std, rows=config.vocab_size))
        self.positions: nn.Module | None = None
        if config.position is Position.learned:
            positions = table(config.context, config.dim)
            self.positions = specify(positions, weight=Spec(Role.embedding, config.init_std))
        self.scale = config.embedding_scale
        self.norm_eps = config.norm_eps if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """tokens, positions: [batch, seq]; positions count from 0 where they are None. Returns [batch, seq, dim]."""
        x = self.tokens(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[-1], device=tokens.device)
            x = x + self.positions(positions)
        if self.norm_eps is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=self.norm_eps)
        return self.dropout(x)
