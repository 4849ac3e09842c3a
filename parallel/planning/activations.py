"""What a micro-batch keeps for its backward pass, from a config alone. No torch here.

As Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, 4.1) count it, adapted to
fused attention, which keeps its output and a log-sum-exp a head in place of the square of scores, to grouped heads and
to each dtype. All are bytes for one token on one of `tp` ranks. parallel: the layout, by default that of one rank."""

from itertools import pairwise

from models.config import Balance, ModelConfig
from parallel.config import ActivationsConfig, Context, Dtype, ParallelConfig, Recompute
from parallel.planning.layout import BYTES, INDEX_BYTES
from parallel.planning.stages import Order, Stage
from parallel.recomputation import NOT_KEPT, keeps_nothing, recomputed_layers, segment_borders, settled

ALONE = ParallelConfig()


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


def block_bytes(model: ModelConfig, compute: Dtype, layer: int, parallel: ParallelConfig = ALONE) -> float:
    """A block of which nothing is computed again keeps the inputs of both norms with mean and deviation, those of
    attention and of the feed-forward layer, queries, keys and values, attention's output, and the feed-forward layer
    before and after GELU. The inputs of attention and of the feed-forward layer are whole on each tensor rank.

    With dim h, as many heads of keys and feed-forward of 4h these are 16h values, 32h bytes in bf16: Korthikanti's 34h
    without two masks of dropout."""
    dim, width, tp = model.dim, BYTES[compute], parallel.tp
    copied = dim if model.fused_qkv and model.key_value_heads < model.heads else 0  # q out of its groups
    shared = 2 * dim + 4 + _projected(model) + copied
    shared += dim if model.x0 or model.skips else 0  # what is mixed, beside the mix
    masks = 2 * dim if model.dropout > 0 else 0  # a byte each
    kept = (shared * width + masks) / tp + _attention_bytes(model, compute, tp) + dim * width
    if model.routed(layer):
        kept += _experts_bytes(model, compute, parallel)
    else:
        kept += 2 * model.feedforward_dim * width / tp + dim * width
    return kept + context_bytes(model, parallel, compute)


def _experts_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """A layer with experts keeps the router's input and scores in float32 or wider, the numbers of the chosen experts
    and the steps to their weights; for each of these a row in and out of its expert and the expert before and after
    GELU, and where the row went, twice where it went to another rank; and what the shared experts keep.

    As many rows come to a rank as go from it, as with even loads."""
    moe, dim, width, wide = model.moe, model.dim, BYTES[compute], max(4, BYTES[compute])
    router = dim + moe.experts + moe.top_k  # its input, scores, the last weights
    router += moe.top_k + 1 if moe.normalize else 0  # the weights before, and their sum
    router += 1 if moe.balance is not Balance.none else 0  # the sum of the scores
    router += moe.experts + 1 if moe.z_loss > 0 else 0  # logits, and their log-sum
    moves = 4 if parallel.ep > 1 else 2
    rows = 2 * (dim + model.expert_dim) * width + (1 + moves) * INDEX_BYTES
    kept = router * wide + moe.top_k * rows + 2 * moe.shared * model.expert_dim * width
    kept += moe.top_k if moe.capacity_factor is not None else 0  # which are within it
    same = parallel.tp == 1 and width == wide  # the shared experts' input is the router's
    return kept / parallel.tp + (dim * width if moe.shared and not same else 0)


def recomputed_block_bytes(
    model: ModelConfig, compute: Dtype, selective: bool, layer: int, parallel: ParallelConfig = ALONE
) -> float:
    """A block that is computed again keeps its input, what attention gave, and what was scattered over tp; where it is
    selective also what every matrix product gave, which those before a scatter give whole. Where experts are apart it
    keeps its input alone."""
    dim, width, tp = model.dim, BYTES[compute], parallel.tp
    kept = stream_bytes(model, compute, tp)
    if keeps_nothing(model, parallel):
        return kept
    kept += _attention_bytes(model, compute, tp) if model.attention not in NOT_KEPT else 0
    kept += 2 * dim * width / tp if tp > 1 else 0
    if selective:
        kept += _projected(model) * width / tp + dim * width
        kept += _feedforward_products(model, compute, layer, tp)
    return kept


def _feedforward_products(model: ModelConfig, compute: Dtype, layer: int, tp: int) -> float:
    """What the matrix products of a feed-forward layer, or of router and experts, give."""
    moe, width = model.moe, BYTES[compute]
    if not model.routed(layer):
        return model.feedforward_dim * width / tp + model.dim * width
    shared = moe.shared * model.expert_dim + model.dim if moe.shared else 0
    experts = moe.top_k * (model.expert_dim + model.dim)
    return moe.experts * max(4, width) + (experts + shared) * width


def head_bytes(model: ModelConfig, compute: Dtype, tp: int = 1, waits: bool = False) -> float:
    """At the peak there are the last norm's input and output, and of the scores three copies in float32 or wider: the
    scores, their exponentials and the gradient; with a soft-cap and a z-loss one more each. While it waits for its
    backward pass only the exponentials are left of the three."""
    copies = (1 if waits else 3) + (model.logit_softcap is not None) + (model.z_loss > 0)
    scores = copies * model.padded_vocab_size * max(4, BYTES[compute])
    return scores / tp + stream_bytes(model, compute, tp) + model.dim * BYTES[compute]


def running_bytes(
    model: ModelConfig, stage: Stage, activations: ActivationsConfig, compute: Dtype, parallel: ParallelConfig = ALONE
) -> float:
    """Of a micro-batch whose backward pass runs: what all blocks keep with the head's, or with what is computed again
    at once, if that is more."""
    kept, again = kept_bytes(model, activations, compute, parallel, stage.layers)
    return kept + max(head_bytes(model, compute, parallel.tp) if stage.last else 0.0, again)


def waiting_bytes(
    model: ModelConfig, stage: Stage, activations: ActivationsConfig, compute: Dtype, parallel: ParallelConfig = ALONE
) -> float:
    """Of a micro-batch that has gone through a stage and waits for its backward pass, with what it handed on."""
    kept, _ = kept_bytes(model, activations, compute, parallel, stage.layers)
    if stage.last:
        return kept + head_bytes(model, compute, parallel.tp, waits=True)
    return kept + model.stream_tensors(stage.layers.stop) * stream_bytes(model, compute, parallel.tp)


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
    parallel: ParallelConfig = ALONE,
    layers: range | None = None,
) -> tuple[float, float]:
    """What blocks keep, all or those of `layers`, and the most that comes on top when some of it is computed again in
    backward."""
    layers = range(model.layers) if layers is None else layers
    mode, tp = settled(activations, model), parallel.tp
    whole = {layer: block_bytes(model, compute, layer, parallel) for layer in layers}
    stream = stream_bytes(model, compute, tp)
    if mode is Recompute.segments:
        borders = segment_borders(activations, len(layers))
        kept = (len(borders) - 1) * stream
        again = max(sum(whole[layer] for layer in layers[first:end]) for first, end in pairwise(borders))
    elif mode is Recompute.offload:
        # the one that runs, and its neighbour on the way
        kept, again = max(sum(whole[layer] for layer in layers[place : place + 2]) for place in range(len(layers))), 0.0
    else:
        part = dict(whole)
        if mode is Recompute.budget:
            part = {layer: stream + activations.budget * (of_block - stream) for layer, of_block in whole.items()}
        for layer in set(recomputed_layers(activations, model)) & set(layers):
            selective = mode is Recompute.selective
            part[layer] = recomputed_block_bytes(model, compute, selective, layer, parallel)
        kept, again = sum(part.values()), max(whole[layer] - part[layer] for layer in layers)
    tables = sum(model.value_table(layer) is not None for layer in layers)
    vectors = tables * 2 * model.key_value_dim * BYTES[compute] / tp  # and what they are mixed with
    return kept + vectors, max(again, 0.0)
