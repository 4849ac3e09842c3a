"""What a micro-batch keeps for its backward pass, from a config alone. No torch here.

As Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, 4.1) count it, adapted to
fused attention, which keeps its output and a log-sum-exp a head in place of the square of scores, to grouped heads and
to each dtype."""

from models.config import ModelConfig
from parallel.config import Dtype, ParallelConfig
from parallel.planning.layout import BYTES
from parallel.planning.traffic import Batch


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Width of the stream, of queries with keys and values, and of the feed-forward layer."""
    keys = model.key_value_heads * (model.dim // model.heads)
    return model.dim, model.dim + 2 * keys, model.feedforward_dim


def attention_bytes(model: ModelConfig, compute: Dtype) -> int:
    """For a token: attention's output and its log-sum-exp."""
    return model.dim * BYTES[compute] + model.heads * max(4, BYTES[compute])


def block_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """A block keeps for a token: the inputs of both norms with mean and deviation, those of attention and of the
    feed-forward layer, queries with keys and values, attention's output, and the feed-forward layer before and after
    GELU. On tp ranks each has its share of these, but the whole inputs of attention and of the feed-forward layer.

    With dim h, as many heads of keys and feed-forward of 4h these are 16h values, 32h bytes in bf16: Korthikanti's 34h
    without two masks of dropout."""
    dim, queries, ffn = _sizes(model)
    copied = dim if model.fused_qkv and model.key_value_heads < model.heads else 0  # q out of its groups
    shared = 2 * dim + 4 + queries + copied + 2 * ffn
    dropped = 2 * dim if model.dropout > 0 else 0  # masks, a byte each
    return ((shared * BYTES[compute] + attention_bytes(model, compute) + dropped) / tp) + 2 * dim * BYTES[compute]


def head_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """At the peak a token has the last norm's input and output, and of its scores three copies in float32 or wider: the
    scores, their exponentials and the gradient; with a soft-cap and a z-loss one more each."""
    copies = 3 + (model.logit_softcap is not None) + (model.z_loss > 0)
    scores = copies * model.padded_vocab_size * max(4, BYTES[compute])
    return (scores + model.dim * BYTES[compute]) / tp + model.dim * BYTES[compute]


def activation_bytes(model: ModelConfig, parallel: ParallelConfig, compute: Dtype, batch: Batch) -> int:
    """At the end of forward, when most is kept."""
    token = model.layers * block_bytes(model, compute, parallel.tp) + head_bytes(model, compute, parallel.tp)
    return round(batch.micro_batch * batch.sequence_length * token)
