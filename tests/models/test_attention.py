"""Attention against its formula, written out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import AttentionCore
from models.config import Attention as Kernel
from tests.models.build import largest_difference, random_decoder, tiny

ON_CPU = [Kernel.auto, Kernel.sdpa, Kernel.flash, Kernel.math]


def by_formula(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Each token alone: the softmax of its scaled products with the tokens it may see."""
    out = torch.zeros_like(v)
    for batch in range(q.shape[0]):
        for t in range(q.shape[2]):
            seen = [s for s in range(t + 1) if documents is None or documents[batch, s] == documents[batch, t]]
            for head in range(q.shape[1]):
                scores = torch.stack([q[batch, head, t] @ k[batch, head, s] for s in seen]) / math.sqrt(q.shape[3])
                shares = scores.exp() / scores.exp().sum()
                out[batch, head, t] = shares @ v[batch, head, seen]
    return out


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("packed", [False, True])
def test_core_is_the_formula(kernel: Kernel, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 3]]) if packed else None
    found = AttentionCore(kernel, dropout=0.0)(q, k, v, None, documents)
    assert largest_difference(found, by_formula(q, k, v, documents)) <= 1e-12


def test_the_named_kernel_is_used() -> None:
    """One that there is not on a CPU is an error, never silently another."""
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="No viable backend"):
        AttentionCore(Kernel.cudnn, dropout=0.0)(q, q, q, None, None)


def test_rows_of_qkv_are_grouped_by_head() -> None:
    """One head alone, with the rows of its group and its columns of `out`, gives its part of the sum."""
    whole: Any = random_decoder(tiny(), dtype=torch.float64).blocks["0"].attention
    size = whole.head_dim
    x = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = whole.out.bias.expand(2, 7, 24)
    for head in range(3):
        own = slice(head * 3 * size, (head + 1) * 3 * size)
        q, k, v = torch.nn.functional.linear(x, whole.qkv.weight[own], whole.qkv.bias[own]).split(size, -1)
        attended = by_formula(q[:, None], k[:, None], v[:, None], None)[:, 0]
        total = total + attended @ whole.out.weight[:, head * size : (head + 1) * size].T
    assert largest_difference(whole(x, None, None), total) <= 1e-12
