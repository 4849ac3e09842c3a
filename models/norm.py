"""Norms of the stream, and of queries and keys."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import ModelConfig, Norm, QKNorm
from models.roles import Role, Spec, specify


def norm_of(config: ModelConfig) -> nn.Module:
    """A norm of the stream."""
    if config.norm is Norm.rmsnorm:
        return rms_norm(config, config.dim)
    norm = nn.LayerNorm(config.dim, config.norm_eps, elementwise_affine=config.norm_weight, bias=config.bias)
    return specify(norm, weight=Spec(Role.norm, mean=1.0), bias=Spec(Role.bias))


def rms_norm(config: ModelConfig, width: int) -> nn.Module:
    norm = nn.RMSNorm(width, config.norm_eps, elementwise_affine=config.norm_weight)
    return specify(norm, weight=Spec(Role.norm, mean=1.0))


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


class HeadsNorm(nn.Module):
    """RMSNorm over all heads together."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(width)) if config.norm_weight else None
        specify(self, weight=Spec(Role.norm, mean=1.0))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, heads, head_dim]. Returns the same shape."""
        return self.normalized(x, self.weight, mean_square)

    def normalized(self, x: Tensor, weight: Tensor | None, mean_square: Callable[[Tensor], Tensor]) -> Tensor:
        """The same with this weight, and with this mean of squares [..., width] -> [..., 1]."""
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        found = (wide * torch.rsqrt(mean_square(wide) + self.eps)).to(x.dtype)
        return (found if weight is None else found * weight).view_as(x)


def qk_norm(config: ModelConfig, width: int) -> nn.Module | None:
    """Of queries or keys [batch, seq, heads, head_dim]; width: of all their heads together."""
    if config.qk_norm is QKNorm.all:
        return HeadsNorm(config, width)
    return rms_norm(config, config.head_size) if config.qk_norm is QKNorm.head else None
