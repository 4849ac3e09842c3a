"""Multi-head latent attention."""

import torch
from torch import Tensor, nn

from models.attention import AttentionCore
from models.config import ModelConfig
from models.norm import rms_norm
from models.position import Rotation
from models.roles import Role, Spec, specify


class LatentAttention(nn.Module):
    """Attention whose keys and values are made, for all heads, from one narrow vector of each token (DeepSeek-AI 2024,
    DeepSeek-V2, 2.1). A head's queries and keys begin with numbers that are not turned; behind them are those that are,
    of the key the same for all heads.

    With rotary.scaling=yarn DeepSeek leaves cosines and sines as they are (rotary.magnitude=1) and multiplies all
    scores: attention_scale is (0.1 mscale ln(factor) + 1)^2 / sqrt(nope_dim + rope_dim)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.latent, heads = config.latent, config.heads
        kv_rank, q_rank = self.latent.kv_rank, self.latent.q_rank

        def projection(inputs: int, outputs: int, bias: bool = False) -> nn.Module:
            linear = nn.Linear(inputs, outputs, bias=bias)
            return specify(linear, weight=Spec(Role.matrix, config.init_std), bias=Spec(Role.bias))

        self.q_down = self.q_norm = None
        if q_rank is None:
            self.q = projection(config.dim, config.query_dim, config.has_qkv_bias)
        else:
            self.q_down = projection(config.dim, q_rank, config.has_qkv_bias)
            self.q_norm = rms_norm(config, q_rank)
            self.q_up = projection(q_rank, config.query_dim)
        self.kv_down = projection(config.dim, kv_rank + self.latent.rope_dim, config.has_qkv_bias)
        self.kv_norm = rms_norm(config, kv_rank)
        self.kv_up = projection(kv_rank, heads * (self.latent.nope_dim + self.latent.value_dim))
        self.shared_key = SharedKey()
        scaled = config.rotary.windows or config.window_of(layer) is None
        self.rotation = Rotation(config, self.latent.rope_dim, scaled)
        scores = config.attention_scale, config.attention_softcap, config.window_of(layer)
        self.core = AttentionCore(config.attention, config.dropout, *scores)
        out = nn.Linear(heads * self.latent.value_dim, config.dim, bias=config.bias)
        self.out = specify(out, weight=Spec(Role.matrix, config.residual_std), bias=Spec(Role.bias))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, values: Tensor | None = None
    ) -> Tensor:
        """x: [batch, seq, dim]; values: None. Returns the shape of x."""
        sizes = self.latent
        q = self._queries(x).unflatten(-1, (-1, sizes.nope_dim + sizes.rope_dim))
        narrow, key = self.kv_down(x).split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        up = self.kv_up(self.kv_norm(narrow)).unflatten(-1, (-1, sizes.nope_dim + sizes.value_dim))
        q, q_turned = q.split([sizes.nope_dim, sizes.rope_dim], dim=-1)
        k, v = up.split([sizes.nope_dim, sizes.value_dim], dim=-1)
        q_turned, k_turned = self.rotation(q_turned, self.shared_key(key).unsqueeze(2), positions)
        q = torch.cat([q, q_turned], dim=-1)
        k = torch.cat([k, k_turned.expand(-1, -1, k.shape[2], -1)], dim=-1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = self.core(q, k, v, positions, documents)
        return self.dropout(self.out(attended.transpose(1, 2).flatten(2)))

    def _queries(self, x: Tensor) -> Tensor:
        """[batch, seq, width of the heads here]."""
        if self.q_down is None or self.q_norm is None:
            queries: Tensor = self.q(x)
        else:
            queries = self.q_up(self.q_norm(self.q_down(x)))
        return queries


class SharedKey(nn.Module):
    """The part of the keys that all heads share, a child without parameters. What cuts the sequence between parts, such
    as tensor parallelism, replaces it."""

    def forward(self, key: Tensor) -> Tensor:
        """key: [batch, seq, rope_dim]. Returns that of the whole sequence."""
        return key
