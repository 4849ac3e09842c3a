"""The feed-forward layer."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.roles import Role, Spec, specify


class FeedForward(nn.Module):
    """down(gelu(up(x))) with the tanh approximation of GELU, as GPT-2 has it (Hendrycks and Gimpel 2016)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        residual_std = config.init_std / math.sqrt(2 * config.layers)
        self.up = specify(
            nn.Linear(config.dim, width, bias=config.bias),
            weight=Spec(Role.matrix, config.init_std),
            bias=Spec(Role.bias),
        )
        self.down = specify(
            nn.Linear(width, config.dim, bias=config.bias),
            weight=Spec(Role.matrix, residual_std),
            bias=Spec(Role.bias),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim]. Returns the same shape."""
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))
