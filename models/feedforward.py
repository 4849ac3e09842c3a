"""The feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import FeedForward as Kind
from models.config import ModelConfig
from models.roles import Role, Spec, specify


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) x up(x)) (Shazeer 2020, GLU Variants)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.kind = config.ffn

        def linear(inputs: int, outputs: int, std: float) -> nn.Module:
            return specify(
                nn.Linear(inputs, outputs, bias=config.bias), weight=Spec(Role.matrix, std), bias=Spec(Role.bias)
            )

        self.gate = linear(config.dim, width, config.init_std) if config.gated else None
        self.up = linear(config.dim, width, config.init_std)
        self.down = linear(width, config.dim, config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim]. Returns the same shape."""
        hidden = (
            activated(self.kind, self.up(x)) if self.gate is None else activated(self.kind, self.gate(x)) * self.up(x)
        )
        return self.dropout(self.down(hidden))


def activated(kind: Kind, x: Tensor) -> Tensor:
    """GELU is the tanh approximation (Hendrycks and Gimpel 2016), as GPT-2 and Gemma have it."""
    if kind in (Kind.gelu, Kind.geglu):
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if kind is Kind.swiglu else F.relu(x).square()
