"""Causal self-attention. The kernel is behind one door, AttentionCore, a child without parameters."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Attention as Kernel
from models.config import ModelConfig
from models.mix import Mix
from models.roles import Role, Spec, specify


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the tokens before and at each token. What changes how a sequence is
    attended to, such as context parallelism, replaces this module."""

    def __init__(self, kernel: Kernel, dropout: float) -> None:
        super().__init__()
        self.kernel = kernel
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """q, k, v: [batch, heads, seq, head_dim], k and v perhaps of fewer heads; positions, documents: [batch, seq] or
        None. A token attends only to tokens of its own document. Returns the shape of q."""
        mask = None
        if documents is not None:
            same_document = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same_document.tril()
        return self.attend(q, k, v, mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """mask: what scaled_dot_product_attention takes; None: causal."""
        dropout = self.dropout if self.training else 0.0
        with self._backend():
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )

    def _backend(self) -> AbstractContextManager[None]:
        if self.kernel in (Kernel.auto, Kernel.sdpa):
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = {
            Kernel.flash: SDPBackend.FLASH_ATTENTION,
            Kernel.efficient: SDPBackend.EFFICIENT_ATTENTION,
            Kernel.cudnn: SDPBackend.CUDNN_ATTENTION,
            Kernel.math: SDPBackend.MATH,
        }
        return sdpa_kernel(backends[self.kernel])


class Attention(nn.Module):
    """Multi-head attention; with fewer heads of keys and values, grouped-query attention (Ainslie et al. 2023).

    Rows of `qkv` lie in groups, one a head of keys and values: the q of its heads, its k, its v. So a cut of dimension
    0 between groups cuts whole heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        dim, bias, groups = config.dim, Spec(Role.bias), config.key_value_heads
        self.head_dim = dim // config.heads
        self.heads_per_group = config.heads // groups
        self.fused = config.fused_qkv

        def linear(rows: int, std: float) -> nn.Module:
            return specify(nn.Linear(dim, rows, bias=config.bias), weight=Spec(Role.matrix, std), bias=bias)

        if self.fused:
            self.qkv = linear(dim + 2 * groups * self.head_dim, config.init_std)
        else:
            self.q = linear(dim, config.init_std)
            self.k = linear(groups * self.head_dim, config.init_std)
            self.v = linear(groups * self.head_dim, config.init_std)
        self.mix = None if config.value_table(layer) is None else Mix(own=0.5, embedding=0.5)
        self.core = AttentionCore(config.attention, config.dropout)
        self.out = linear(dim, config.init_std / math.sqrt(2 * config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        """x: [batch, seq, dim]; values: a ValueEmbedding's vectors, where the block has one. Returns the shape of x."""
        q, k, v = self._heads(x)
        if self.mix is not None:
            assert values is not None
            v = self.mix(v, values.unflatten(-1, (-1, self.head_dim)))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = self.core(q, k, v, positions, documents)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each [batch, seq, heads, head_dim], of as many heads as the weights here have rows for."""
        if not self.fused:
            return tuple(part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        groups = self.qkv(x).unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))
        return tuple(part.flatten(2, 3) for part in groups.split([self.heads_per_group, 1, 1], dim=3))
