"""Tokens and positions to vectors."""

import torch
from torch import Tensor, nn

from models.config import ModelConfig
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
        specify(self.table, weight=Spec(Role.embedding, config.init_std, rows=config.vocab_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, seq]. Returns [batch, seq, width of the values here]."""
        vectors: Tensor = self.table(tokens)
        return vectors


class Embedding(nn.Module):
    """The sum of a token's and its position's vector. The token table is padded below the vocabulary with rows of
    zeros."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        tokens = table(config.padded_vocab_size, config.dim)
        self.tokens = specify(tokens, weight=Spec(Role.embedding, config.init_std, rows=config.vocab_size))
        positions = table(config.context, config.dim)
        self.positions = specify(positions, weight=Spec(Role.embedding, config.init_std))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """tokens, positions: [batch, seq]; positions count from 0 where they are None. Returns [batch, seq, dim]."""
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))
