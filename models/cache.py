"""Keys and values of tokens that a model has seen, so that writing the next token computes that token alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.attention import AttentionCore


class Cache:
    """What all layers share: how many tokens are kept, and which of them are text.

    `documents`: [batch, capacity], of which padding is another than text."""

    def __init__(self, documents: Tensor) -> None:
        self.documents, self.filled = documents, 0


class CachedCore(nn.Module):
    """AttentionCore of tokens that come after those in a cache, which they join. `filled` says how many of them stay:
    the others are overwritten."""

    def __init__(self, core: AttentionCore, cache: Cache) -> None:
        super().__init__()
        self.core, self.cache = core, cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """As AttentionCore, of the new tokens; documents are those of the cache."""
        if self.keys is None or self.values is None:
            capacity = self.cache.documents.shape[1]
            self.keys, self.values = (part.new_zeros(*part.shape[:2], capacity, part.shape[3]) for part in (k, v))
        start, end = self.cache.filled, self.cache.filled + q.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        return self.core.attend(q, self.keys[:, :, :end], self.values[:, :, :end], self.cache.documents[:, :end])


@contextmanager
def remembering(model: nn.Module, documents: Tensor) -> Iterator[Cache]:
    """Within it every AttentionCore of a model keeps what it sees. documents: see Cache."""
    cache, replaced = Cache(documents), []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AttentionCore) and not isinstance(module, CachedCore):
                setattr(module, name, CachedCore(child, cache))
                replaced.append((module, name, child))
    try:
        yield cache
    finally:
        for module, name, child in replaced:
            setattr(module, name, child)


def left_padded(prompts: list[list[int]], width: int, capacity: int, device: torch.device) -> tuple[Tensor, ...]:
    """Prompts that end together: tokens and positions [prompts, width], and documents [prompts, capacity] in which
    padding is -1 and all else 0. No prompt is longer than width."""
    missing = torch.tensor([width - len(prompt) for prompt in prompts], device=device).unsqueeze(1)
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    positions = (torch.arange(width, device=device) - missing).clamp(min=0)
    return tokens, positions, torch.where(torch.arange(capacity, device=device) < missing, -1, 0)
