"""torch's grouped matrix product beside a loop over experts, forward and backward, for scripts/gpu_check.py."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from models.moe import grouped_product, looped_product

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
# Norm of the difference over the norm: both round a result to bf16 once (2^-8); float32 sums in another order.
BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
TURNS = 9


@dataclass(frozen=True)
class Sizes:
    """rows: tokens times the experts that each goes to."""

    rows: int
    dim: int
    hidden: int
    experts: int


@dataclass(frozen=True)
class Compared:
    """The largest difference of the result and both gradients, and the median seconds."""

    difference: float
    grouped: float
    looped: float


def compare(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Compared:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sizes.rows, sizes.dim, generator=generator).to(device, dtype).requires_grad_()
    weights = torch.randn(sizes.experts, sizes.hidden, sizes.dim, generator=generator) / sizes.dim**0.5
    weights = weights.to(device, dtype).requires_grad_()
    gradient = torch.randn(sizes.rows, sizes.hidden, generator=generator).to(device, dtype)
    counts = uneven(sizes, generator).to(device)
    seconds: dict[Product, list[float]] = {grouped_product: [], looped_product: []}
    found: dict[Product, list[Tensor]] = {}
    for _ in range(1 + TURNS):  # the first is not counted: kernels are loaded in it
        for product, taken in seconds.items():
            wait(device)
            began = perf_counter()
            y = product(rows, weights, counts)
            found[product] = [y.detach(), *torch.autograd.grad(y, (rows, weights), gradient)]
            wait(device)
            taken.append(perf_counter() - began)
    apart = zip(found[grouped_product], found[looped_product], strict=True)
    difference = max(float((ours - theirs).double().norm() / theirs.double().norm()) for ours, theirs in apart)
    return Compared(difference, *[median(taken[1:]) for taken in seconds.values()])


def uneven(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Rows of each expert, int64 [experts]: the first has none, the share of the others is random."""
    shares = torch.rand(sizes.experts, generator=generator)
    shares[0] = 0
    drawn = torch.multinomial(shares, sizes.rows, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=sizes.experts)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
