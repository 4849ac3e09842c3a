"""Scores bent into a range."""

import torch
from torch import Tensor


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """cap x tanh(scores / cap) (Gemma Team 2024, Gemma 2, 2)."""
    return scores if cap is None else cap * torch.tanh(scores / cap)
