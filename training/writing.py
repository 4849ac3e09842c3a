"""Texts that a model writes: one token after the other, each drawn from what it says of the next."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.cache import left_padded, remembering
from models.derive import derive


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature: logits are divided by it, 0 takes the likeliest; top_k: of so many likeliest;
    top_p: of the likeliest whose shares sum to this (Holtzman et al. 2020, nucleus sampling)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


def shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits: [vocabulary]. The probability with which each token is drawn, float64."""
    logits = logits.double()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    logits = (logits - logits.max()) / sampling.temperature  # the largest stays finite, however low the temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -math.inf)
    found = logits.softmax(0)
    if sampling.top_p is not None:
        ordered, order = found.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # the likeliest is always kept
        found = found.index_fill(0, order[before >= sampling.top_p], 0.0)
        found = found / found.sum()
    return found


@torch.no_grad()
def write(
    model: nn.Module,
    forward: Callable[..., Tensor],
    prompts: list[list[int]],
    count: int,
    sampling: Sampling,
    seed: int,
    end_of_text: int,
    device: torch.device,
    parts: int = 1,
) -> list[list[int]]:
    """Up to `count` tokens after each prompt, which ends where end_of_text is drawn. Each has random numbers of its
    own, so it does not depend on the others.

    forward: of `model`, given tokens and positions [prompts, width], gives logits. parts: widths are a multiple of it
    (ranks that cut the sequence). Every rank draws the same."""
    width = -(-max(map(len, prompts)) // parts) * parts
    tokens, positions, documents = left_padded(prompts, width, width + count + parts, device)
    generators = [torch.Generator().manual_seed(derive(seed, "writing", row)) for row in range(len(prompts))]
    written: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    with remembering(model, documents) as cache:
        logits = forward(tokens=tokens, positions=positions)[:, -1].cpu()
        cache.filled = width
        for done in range(1, count + 1):
            for row in sorted(open_rows):
                drawn = shares(logits[row], sampling)
                token = int(
                    drawn.argmax()
                    if sampling.temperature == 0
                    else torch.multinomial(drawn, 1, generator=generators[row])
                )
                if token == end_of_text:
                    open_rows.remove(row)
                else:
                    written[row].append(token)
            if not open_rows or done == count:
                return written
            last = [row[-1] if row else end_of_text for row in written]
            tokens = torch.tensor(last, device=device).unsqueeze(1).expand(-1, parts)
            positions = positions[:, -1:] + 1
            logits = forward(tokens=tokens, positions=positions.expand(-1, parts))[:, 0].cpu()
            cache.filled += 1
    return written
