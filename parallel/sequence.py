"""The tokens of each sequence that a rank along `cp` has."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class SequenceShare:
    """Which tokens of each sequence a rank has. Of 2 x cp equal pieces it is one from the start and one as far from the
    end, so that causal attention costs every rank the same (Llama Team 2024, The Llama 3 Herd of Models, 3.3.2)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: of the axis cp alone."""
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    @property
    def pieces(self) -> tuple[int, int]:
        """The two of this rank, of 2 x size."""
        return self.rank, 2 * self.size - 1 - self.rank

    def order(self, length: int, device: torch.device) -> Tensor:
        """[length]: the place of each token in the sequence, in the order in which ranks have them."""
        pieces = torch.arange(length, device=device).view(2, self.size, -1)
        return torch.stack([pieces[0], pieces[1].flip(0)], dim=1).flatten()

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[length / size]: the places of this rank's tokens."""
        return self.order(length, device).chunk(self.size)[self.rank]

    def cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Decoder.forward's inputs of whole sequences to those of this rank's tokens. Documents stay whole: attention
        compares those of all tokens."""
        tokens = inputs["tokens"]
        own = self.positions(tokens.shape[1], tokens.device)
        cut = {name: inputs[name][:, own] for name in ("tokens", "labels", "positions") if inputs.get(name) is not None}
        return inputs | {"positions": own.expand(len(tokens), -1)} | cut

    def own(self, values: Tensor) -> Tensor:
        """values: [batch, seq, ...]. Returns those of this rank's tokens, [batch, seq / size, ...]."""
        return values[:, self.positions(values.shape[1], values.device)]

    def whole(self, values: Tensor) -> Tensor:
        """values: [batch, seq / size, ...] of this rank's tokens, no gradients. Returns [batch, seq, ...], the same on
        every rank. A collective."""
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        joined = torch.cat(parts, dim=1)
        return joined[:, self.order(joined.shape[1], joined.device).argsort()]
