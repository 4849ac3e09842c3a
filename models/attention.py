"""Causal self-attention. The kernel is behind one door, AttentionCore, a child without parameters."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Attention as Kernel
from models.config import ModelConfig
from models.roles import Role, Spec, specify


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the tokens before and at each token. What changes how a sequence is
    attended to, such as context parallelism, replaces this module."""

    def __init__(self, kernel: Kernel, dropout: float) -> None:
        super().__init__()
        self.kernel = kernel
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """q, k, v: [batch, heads, seq, head_dim]; positions, documents: [batch, seq] or None. A token attends only to
        tokens of its own document. Returns [batch, heads, seq, head_dim]."""
        mask = None
        if documents is not None:
            same_document = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same_document.tril()
        dropout = self.dropout if self.training else 0.0
        with self._backend():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)

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
    """Multi-head attention. Rows of `qkv` lie in groups, one a head: its q, its k, its v; so a cut of dimension 0
    between groups cuts whole heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, bias = config.dim, Spec(Role.bias)
        self.head_dim = dim // config.heads
        residual_std = config.init_std / math.sqrt(2 * config.layers)
        self.qkv = specify(
            nn.Linear(dim, 3 * dim, bias=config.bias), weight=Spec(Role.matrix, config.init_std), bias=bias
        )
        self.core = AttentionCore(config.attention, config.dropout)
        self.out = specify(nn.Linear(dim, dim, bias=config.bias), weight=Spec(Role.matrix, residual_std), bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """x: [batch, seq, dim]. Returns the same shape."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # [batch, seq, heads, 3, head_dim]
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        attended = self.core(q, k, v, positions, documents)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
