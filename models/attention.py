"""Causal self-attention. The kernel is behind one door, AttentionCore, a child without parameters."""

from torch import Tensor, nn

from models.backends import OF_ANY_WIDTH
from models.config import Attention as Kernel
from models.config import ModelConfig, Position
from models.kernels import KERNELS, Scores, switch_to, widened
from models.mix import Mix
from models.norm import qk_norm
from models.position import Rotation
from models.roles import Role, Spec, specify


class AttentionCore(nn.Module):
    """softmax(scale q k^T) v over the tokens before and at each token, or those of a window. What changes how a
    sequence is attended to, such as context parallelism, replaces this module."""

    def __init__(
        self,
        kernel: Kernel,
        dropout: float,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        """As models.kernels.Scores."""
        super().__init__()
        switch_to(kernel)
        self.kernel, self.dropout = kernel, dropout
        self.scale, self.softcap, self.window = scale, softcap, window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """q, k, v: [batch, heads, seq, head_dim], k and v perhaps of fewer heads, v perhaps narrower; positions,
        documents: [batch, seq] or None. A token attends only to tokens of its own document. Returns [batch, heads, seq,
        width of v]."""
        return self.attend(q, k, v, documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """The same of the last queries of so many keys; documents: of the keys."""
        dropout = self.dropout if self.training else 0.0
        scores = Scores(self.scale, self.softcap, self.window, dropout)
        width = v.shape[-1]
        if self.kernel not in OF_ANY_WIDTH:
            v = widened(v, q.shape[-1])
        return KERNELS[self.kernel](q, k, v, documents, scores)[..., :width]


class Attention(nn.Module):
    """Multi-head attention; with fewer heads of keys and values, grouped-query attention (Ainslie et al. 2023).

    Rows of `qkv` lie in groups, one a head of keys and values: the q of its heads, its k, its v. So a cut of dimension
    0 between groups cuts whole heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        queries, keys = config.query_dim, config.key_value_dim
        self.head_dim = config.head_size
        self.heads_per_group = config.heads // config.key_value_heads
        self.fused = config.fused_qkv

        def projection(rows: int) -> nn.Module:
            linear = nn.Linear(config.dim, rows, bias=config.has_qkv_bias)
            return specify(linear, weight=Spec(Role.matrix, config.init_std), bias=Spec(Role.bias))

        if self.fused:
            self.qkv = projection(queries + 2 * keys)
        else:
            self.q, self.k, self.v = projection(queries), projection(keys), projection(keys)
        self.q_norm, self.k_norm = qk_norm(config, queries), qk_norm(config, keys)
        self.rotation = None
        if config.position is Position.rotary:
            scaled = config.rotary.windows or config.window_of(layer) is None
            self.rotation = Rotation(config, self.head_dim, scaled)
        self.mix = None if config.value_table(layer) is None else Mix(own=0.5, embedding=0.5)
        scores = config.score_scale, config.attention_softcap, config.window_of(layer)
        self.core = AttentionCore(config.attention, config.dropout, *scores)
        out = nn.Linear(queries, config.dim, bias=config.bias)
        self.out = specify(out, weight=Spec(Role.matrix, config.residual_std), bias=Spec(Role.bias))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        """x: [batch, seq, dim]; values: a ValueEmbedding's vectors, where the block has one. Returns the shape of x."""
        q, k, v = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            q, k = self.rotation(q, k, positions)
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
