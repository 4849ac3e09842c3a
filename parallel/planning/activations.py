"""What a micro-batch keeps for its backward pass, from a config alone. No torch here.

As Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, 4.1) count it, adapted to
fused attention, which keeps its output and a log-sum-exp a head in place of the square of scores, to grouped heads and
to each dtype. All are bytes for one token on one of `tp` ranks."""

from itertools import pairwise

from models.config import Attention, ModelConfig
from parallel.config import ActivationsConfig, Context, Dtype, ParallelConfig, Recompute
from parallel.planning.layout import BYTES
from parallel.planning.stages import Order, Stage
from parallel.recomputation import recomputed_layers, segment_borders, settled


def stream_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """The stream between blocks: a rank has its share of the sequence."""
    return model.dim * BYTES[compute] / tp


def _attention_bytes(model: ModelConfig, compute: Dtype, tp: int) -> float:
    """Attention's output and its log-sum-exp."""
    return (model.dim * BYTES[compute] + model.heads * max(4, BYTES[compute])) / tp


def _projected(model: ModelConfig) -> int:
    """Width of queries, keys and values."""
    return model.dim + 2 * model.key_value_dim


def context_bytes(model: ModelConfig, parallel: ParallelConfig, compute: Dtype) -> float:
    """What attention over ranks that share sequences keeps beside what it keeps on one: keys and values of the other
    ranks, and its output twice, for its own backward pass and for the projection."""
    if parallel.cp == 1 or parallel.context is Context.ring:
        return 0.0
    others = 2 * model.key_value_dim * (parallel.cp - 1) if parallel.context is Context.gather else 0
    return (others + model.dim) * BYTES[compute] / parallel.tp


def block_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """A block of which nothing is computed again keeps the inputs of both norms with mean and deviation, those of
    attention and of the feed-forward layer, queries, keys and values, attention's output, and the feed-forward layer
    before and after GELU. The inputs of attention and of the feed-forward layer are whole on each tensor rank.

    With dim h, as many heads of keys and feed-forward of 4h these are 16h values, 32h bytes in bf16: Korthikanti's 34h
    without two masks of dropout."""
    dim, width = model.dim, BYTES[compute]
    copied = dim if model.fused_qkv and model.key_value_heads < model.heads else 0  # q out of its groups
    shared = 2 * dim + 4 + _projected(model) + copied + 2 * model.feedforward_dim
    shared += dim if model.x0 or model.skips else 0  # what is mixed, beside the mix
    masks = 2 * dim if model.dropout > 0 else 0  # a byte each
    return (shared * width + masks) / tp + _attention_bytes(model, compute, tp) + 2 * dim * width


def recomputed_block_bytes(model: ModelConfig, compute: Dtype, selective: bool, tp: int = 1) -> float:
    """A block that is computed again keeps its input, what attention gave, and what was scattered over tp; where it is
    selective also what every matrix product gave, which those before a scatter give whole."""
    dim, width = model.dim, BYTES[compute]
    kept = stream_bytes(model, compute, tp)
    kept += _attention_bytes(model, compute, tp) if model.attention is not Attention.math else 0
    kept += 2 * dim * width / tp if tp > 1 else 0
    if selective:
        kept += (_projected(model) + model.feedforward_dim) * width / tp + 2 * dim * width
    return kept


def head_bytes(model: ModelConfig, compute: Dtype, tp: int = 1, waits: bool = False) -> float:
    """At the peak there are the last norm's input and output, and of the scores three copies in float32 or wider: the
    scores, their exponentials and the gradient; with a soft-cap and a z-loss one more each. While it waits for its
    backward pass only the exponentials are left of the three."""
    copies = (1 if waits else 3) + (model.logit_softcap is not None) + (model.z_loss > 0)
    scores = copies * model.padded_vocab_size * max(4, BYTES[compute])
    return scores / tp + stream_bytes(model, compute, tp) + model.dim * BYTES[compute]


def running_bytes(
    model: ModelConfig, stage: Stage, activations: ActivationsConfig, compute: Dtype, tp: int = 1, context: float = 0.0
) -> float:
    """Of a micro-batch whose backward pass runs: what all blocks keep with the head's, or with what is computed again
    at once, if that is more."""
    kept, again = kept_bytes(model, activations, compute, tp, stage.layers, context)
    return kept + max(head_bytes(model, compute, tp) if stage.last else 0.0, again)


def waiting_bytes(
    model: ModelConfig, stage: Stage, activations: ActivationsConfig, compute: Dtype, tp: int = 1, context: float = 0.0
) -> float:
    """Of a micro-batch that has gone through a stage and waits for its backward pass, with what it handed on."""
    kept, _ = kept_bytes(model, activations, compute, tp, stage.layers, context)
    if stage.last:
        return kept + head_bytes(model, compute, tp, waits=True)
    return kept + model.stream_tensors(stage.layers.stop) * stream_bytes(model, compute, tp)


def peak_bytes(order: Order, waiting: dict[int, float], running: dict[int, float]) -> float:
    """The most that the micro-batches of a rank keep at once, in the order of its passes. waiting, running: by stage
    bytes of a micro-batch between its passes, and while its backward pass runs."""
    held = most = 0.0
    for kind, stage in order:
        if kind == "F":
            held += waiting[stage]
            most = max(most, held)
        else:
            most = max(most, held - waiting[stage] + running[stage])
        if kind in ("B", "W"):
            held -= waiting[stage]
    return most


def kept_bytes(
    model: ModelConfig,
    activations: ActivationsConfig,
    compute: Dtype,
    tp: int = 1,
    layers: range | None = None,
    context: float = 0.0,
) -> tuple[float, float]:
    """What blocks keep, all or those of `layers`, and the most that comes on top when some of it is computed again in
    backward. context: what context_bytes says."""
    layers = range(model.layers) if layers is None else layers
    whole, stream = block_bytes(model, compute, tp) + context, stream_bytes(model, compute, tp)
    mode, number = settled(activations, model), len(layers)
    kept, again = number * whole, 0.0
    if mode in (Recompute.full, Recompute.selective, Recompute.every_n):
        count = len(set(recomputed_layers(activations, model)) & set(layers))
        part = recomputed_block_bytes(model, compute, mode is Recompute.selective, tp)
        kept, again = count * part + (number - count) * whole, max(whole - part, 0.0)
    elif mode is Recompute.segments:
        borders = segment_borders(activations, number)
        kept = (len(borders) - 1) * stream
        again = max(end - first for first, end in pairwise(borders)) * whole
    elif mode is Recompute.budget:
        part = stream + activations.budget * (whole - stream)
        kept, again = number * part, whole - part
    elif mode is Recompute.offload:
        kept = min(number, 2) * whole  # the one that runs, and its neighbour on the way
    tables = sum(model.value_table(layer) is not None for layer in layers)
    vectors = tables * 2 * model.key_value_dim * BYTES[compute] / tp  # and what they are mixed with
    return kept + vectors, again
