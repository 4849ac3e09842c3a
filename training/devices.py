"""Whether the ranks of a run have devices of one kind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.refusal import Problem

SAME_MEMORY = 0.02  # drivers keep a little for themselves, each its own amount


@dataclass(frozen=True)
class Card:
    """A rank's device. memory_bytes: None on a CPU, where ranks share their host's."""

    model: str
    memory_bytes: int | None = None

    def is_like(self, other: "Card") -> bool:
        one, another = self.memory_bytes or 0, other.memory_bytes or 0
        return self.model == other.model and abs(one - another) <= SAME_MEMORY * max(one, another)

    def __str__(self) -> str:
        return self.model if self.memory_bytes is None else f"{self.model} ({self.memory_bytes / 2**30:.1f} GiB)"


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card("CPU")
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, properties.total_memory)


def mixed_devices(cards: Sequence[Card], allow: str) -> list[Problem]:
    """A problem where the ranks' devices are of several kinds. allow: what to write to go on with them."""
    kinds: dict[Card, list[int]] = {}
    for rank, card in enumerate(cards):
        known = next((kind for kind in kinds if kind.is_like(card)), card)
        kinds.setdefault(known, []).append(rank)
    if len(kinds) < 2:
        return []
    told = "; ".join(f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {kind}" for kind, ranks in kinds.items())
    reason = f"all would wait for the slowest and be limited by the smallest: {told}"
    most = max(kinds, key=lambda kind: len(kinds[kind]))
    return [Problem("parallel.allow_mixed_devices", False, reason, f"{allow}, or only ranks with {most}")]


def named(ranks: Sequence[int]) -> str:
    """Ranks in rising order, neighbours as one range: "ranks 0-7, 9"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    listed = ", ".join(f"{some[0]}-{some[-1]}" if len(some) > 1 else str(some[0]) for some in ranges)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
