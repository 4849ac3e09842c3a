"""Rotary positions (Su et al. 2021, RoFormer)."""

import math

import torch
from torch import Tensor, nn

from models.config import ModelConfig, RotaryScaling


class Rotation(nn.Module):
    """Turns pairs of each head's numbers, i and i + half, by an angle that grows with the position."""

    def __init__(self, config: ModelConfig, width: int, scaled: bool) -> None:
        """width: numbers of a head that may be turned; scaled: whether the config's scaling is for this one."""
        super().__init__()
        pairs = int(width * config.rotary.share) // 2
        speeds = rotary_speeds(config, pairs, scaled)
        # No buffer, which DDP would broadcast. Moved by whoever gives parameters their memory.
        with torch.device("cpu"):
            self.speeds = torch.tensor(speeds, dtype=torch.float64)
        self.magnitude = rotary_magnitude(config) if scaled else 1.0

    def angles(self, positions: Tensor | None, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's angles: [batch or 1, seq, 1, pairs]. positions: [batch, seq]; counted from 0
        where None."""
        if positions is None:
            positions = torch.arange(length, device=self.speeds.device).unsqueeze(0)
        angles = (positions.unsqueeze(-1) * self.speeds.to(dtype)).unsqueeze(2)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """q, k: [batch, seq, heads, head_dim]. Returns the same shapes."""
        cos, sin = self.angles(positions, q.shape[1], torch.promote_types(q.dtype, torch.float32))
        return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, seq, heads, head_dim], of which the first 2 x pairs are turned, in the dtype of cos."""
    pairs = cos.shape[-1]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*(part.to(x.dtype) for part in parts), rest], dim=-1)


def rotary_speeds(config: ModelConfig, pairs: int, scaled: bool) -> list[float]:
    """Radians a position, of each pair."""
    rotary = config.rotary
    plain = [rotary.theta ** (-pair / pairs) for pair in range(pairs)]
    original = config.context if rotary.original_context is None else rotary.original_context
    if not scaled or rotary.scaling is RotaryScaling.none:
        return plain
    if rotary.scaling is RotaryScaling.linear:
        return [speed / rotary.factor for speed in plain]
    if rotary.scaling is RotaryScaling.llama3:
        return [_mixed(speed, rotary.factor, _llama3(speed * original / math.tau, config)) for speed in plain]
    first, last = (
        pairs * math.log(original / (turns * math.tau)) / math.log(rotary.theta)  # the pair that turns so often
        for turns in (rotary.beta_fast, rotary.beta_slow)
    )
    low, high = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    ramp = [(pair - low) / max(high - low, 1e-3) for pair in range(pairs)]
    return [_mixed(speed, rotary.factor, 1 - min(max(of, 0.0), 1.0)) for speed, of in zip(plain, ramp, strict=True)]


def _mixed(speed: float, factor: float, kept: float) -> float:
    return kept * speed + (1 - kept) * speed / factor


def _llama3(turns: float, config: ModelConfig) -> float:
    """How much of its speed a pair keeps that turns so often in the original length (Llama 3.1's release)."""
    low, high = config.rotary.low_frequency, config.rotary.high_frequency
    return min(max((turns - low) / (high - low), 0.0), 1.0)


def rotary_magnitude(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by (Peng et al. 2023, YaRN, equation 22)."""
    rotary = config.rotary
    if rotary.scaling is not RotaryScaling.yarn:
        return 1.0
    return 0.1 * math.log(rotary.factor) + 1 if rotary.magnitude is None else rotary.magnitude
