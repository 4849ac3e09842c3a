"""Learned weighted sums."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.roles import Role, Spec, specify


class Mix(nn.Module):
    """The sum of tensors of one shape, each times a learned number."""

    def __init__(self, **first: float) -> None:
        """first: of each tensor, in their order, a name for its number and the value it begins with."""
        super().__init__()
        self.names = list(first)
        for name in first:
            self.register_parameter(name, nn.Parameter(torch.empty(1)))
        specify(self, **{name: Spec(Role.scalar, mean=value) for name, value in first.items()})

    def forward(self, *tensors: Tensor) -> Tensor:
        return weighted_sum([getattr(self, name) for name in self.names], tensors)


def weighted_sum(weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """weights: each of shape [1]."""
    first, *others = [weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]
    return sum(others, start=first)
