"""PowerSGD (Vogels et al. 2019): the gradients of matrices are summed over ranks as two narrow factors."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.derive import derive
from parallel.config import Compression


class PowerSGD:
    """Sums gradients over ranks, approximately: one step of power iteration from the last step's factor. What a rank's
    gradient has beyond its share of the sum is its error, and is added to its next gradient.

    State lies beside each parameter, by its name: DDP lays out its buckets anew after the first step of each start, so
    what is kept by bucket, as torch's own hook does, would be lost or mixed up. All parameters are summed together
    after the backward pass, in three collectives.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup, compression: Compression, seed: int
    ) -> None:
        self.group = group
        self.start_step = compression.start_step
        self.steps_done = 0  # of the run
        self.whole: list[nn.Parameter] = []
        self.matrices: dict[str, nn.Parameter] = {}
        self.errors: dict[str, Tensor] = {}  # [rows, columns]
        self.factors: dict[str, Tensor] = {}  # [columns, rank], the same on every rank
        for name, parameter in parameters.items():
            if (cut := compression.factors(parameter.shape)) is None:
                self.whole.append(parameter)
                continue
            rows, columns, rank = cut
            generator = torch.Generator().manual_seed(derive(seed, "powersgd", name))
            first = torch.randn(columns, rank, generator=generator, dtype=parameter.dtype)
            self.matrices[name] = parameter
            self.errors[name] = torch.zeros(rows, columns, dtype=parameter.dtype, device=parameter.device)
            self.factors[name] = first.to(parameter.device)
        self.next_errors: dict[str, Tensor] = {}
        self.next_factors: dict[str, Tensor] = {}

    @property
    def begun(self) -> bool:
        """Whether this step's gradients are summed here; before, DDP sums them."""
        return self.steps_done >= self.start_step

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Leaves the sum over ranks in each parameter's gradient, which is this rank's own before. A collective."""
        if not self.begun:
            return
        _sum([_gradient(parameter) for parameter in self.whole], self.group)
        mine = {name: _matrix(parameter) + self.errors[name] for name, parameter in self.matrices.items()}
        left = {name: matrix @ _orthogonal(self.factors[name]) for name, matrix in mine.items()}
        _sum(list(left.values()), self.group)
        left = {name: _orthogonal(factor) for name, factor in left.items()}
        right = {name: matrix.T @ left[name] for name, matrix in mine.items()}
        _sum(list(right.values()), self.group)
        ranks = dist.get_world_size(self.group)
        for name, parameter in self.matrices.items():
            summed = left[name] @ right[name].T
            mine[name] -= summed / ranks
            _matrix(parameter).copy_(summed)
        self.next_errors, self.next_factors = mine, right

    @torch.no_grad()
    def keep(self, skipped: Tensor) -> None:
        """After a step. skipped: 1 where it changed nothing, which holds for errors and factors too."""
        for kept, new in ((self.errors, self.next_errors), (self.factors, self.next_factors)):
            for name in new:
                kept[name] = torch.where(skipped > 0, kept[name], new[name])
        self.next_errors, self.next_factors = {}, {}
        self.steps_done += 1

    def tensors(self) -> dict[str, Tensor]:
        """All state of this rank as one flat dict, to save or to load into."""
        rank = dist.get_rank(self.group)
        errors = {f"{rank}.{name}.error": value for name, value in self.errors.items()}
        return errors | {f"{rank}.{name}.factor": value for name, value in self.factors.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _matrix(parameter: nn.Parameter) -> Tensor:
    """The gradient, [rows, columns]."""
    return _gradient(parameter).view(-1, parameter.shape[-1])


def _orthogonal(factor: Tensor) -> Tensor:
    """An orthonormal basis of its columns; zeros give some basis too."""
    return torch.linalg.qr(factor).Q


def _sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """In place over the ranks, in one collective."""
    if not tensors:
        return
    together = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(together, group=group)
    for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
