"""What a micro-batch keeps for its backward pass, from a config alone. No torch here.

As Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, 4.1) count it, adapted to
fused attention, which keeps its output and a log-sum-exp a head in place of the square of scores, to grouped heads and
to each dtype. All are bytes for one token on one of `tp` ranks. parallel: the layout, by default that of one rank."""

from itertools import pairwise

from models.config import Balance, ModelConfig, Norm, NormPlace, Position, QKNorm
from parallel.config import ActivationsConfig, Context, Dtype, ParallelConfig, Recompute, experts_apart
from parallel.planning.layout import BYTES, INDEX_BYTES, cut_parts
from parallel.planning.stages import Order, Stage
from parallel.recomputation import NOT_KEPT, keeps_nothing, recomputed_layers, segment_borders, settled

ALONE = ParallelConfig()


def stream_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """The stream between blocks: a rank has its share of the sequence."""
    return model.dim * BYTES[compute] / tp


def _attention_bytes(model: ModelConfig, compute: Dtype, tp: int) -> float:
    """Attention's output and, of a fused kernel, its log-sum-exp."""
    log_sums = model.heads * max(4, BYTES[compute]) if model.attention_softcap is None else 0
    return (model.query_dim * BYTES[compute] + log_sums) / tp


def _projected(model: ModelConfig) -> int:
    """Width of queries, keys and values."""
    return model.query_dim + 2 * model.key_value_dim


def _heads_bytes(model: ModelConfig, compute: Dtype) -> float:
    """Queries, keys and values, as they are projected and as attention takes them.

    Each projection that something needs: values, and queries and keys unless they are only turned. A matrix for all
    three is kept whole, with the queries copied out of its groups. A norm over all heads computes on a copy in float32
    or wider and, with a weight, keeps what it multiplies. Bent scores need keys and values of every head."""
    width, wide, queries, keys = BYTES[compute], max(4, BYTES[compute]), model.query_dim, model.key_value_dim
    both, rotary, bent = queries + keys, model.position is Position.rotary, model.attention_softcap is not None
    of_all, normed = model.qk_norm is QKNorm.all, model.qk_norm is not QKNorm.none
    copied = of_all and (model.fused_qkv or width < wide)
    needed = 0 if copied or (rotary and not normed) else both
    kept: float = needed + (0 if bent else keys)
    if model.fused_qkv and kept > 0:
        kept = _projected(model) + (queries if needed and model.key_value_heads < model.heads else 0)
    taken = both if rotary or normed else 0
    if bent:
        taken = (queries if rotary or normed else 0) + 2 * queries
    kept = (kept + taken) * width
    if of_all:
        kept += (both if copied else 0) * wide + (both * width if model.norm_weight else 0) + 2 * wide
    elif normed:
        kept += (model.heads + model.key_value_heads) * wide  # a root of a mean square each
    return kept


def _norms_bytes(model: ModelConfig, compute: Dtype) -> float:
    """The inputs of a block's norms with mean and deviation, or the root of the mean square."""
    width, number = BYTES[compute], 4 if model.norm_place is NormPlace.both else 2
    return number * (model.dim * width + (2 * width if model.norm is Norm.layernorm else max(4, width)))


def _square_bytes(model: ModelConfig, compute: Dtype, length: int) -> float:
    """What attention keeps of each token's scores with so many others, where no fused kernel does without: the mask of
    a window, and bent scores twice in float32 or wider with what they are rounded to. Masks are those of one sequence,
    which those of a micro-batch share."""
    width, wide = BYTES[compute], max(4, BYTES[compute])
    if model.attention_softcap is not None:
        return length * (model.heads * (2 * wide + (width if width < wide else 0)) + 1)
    return length * width if model.window is not None and model.window < length else 0


def context_bytes(model: ModelConfig, parallel: ParallelConfig, compute: Dtype) -> float:
    """What attention over ranks that share sequences keeps beside what it keeps on one: keys and values of the other
    ranks, and its output twice, for its own backward pass and for the projection."""
    if parallel.cp == 1 or parallel.context is Context.ring:
        return 0.0
    others = 2 * model.key_value_dim * (parallel.cp - 1) if parallel.context is Context.gather else 0
    return (others + model.query_dim) * BYTES[compute] / parallel.tp


def block_bytes(
    model: ModelConfig, compute: Dtype, layer: int, parallel: ParallelConfig = ALONE, length: int = 0
) -> float:
    """A block of which nothing is computed again keeps the inputs of its norms, those of attention and of the
    feed-forward layer, queries, keys and values, attention's output, and the feed-forward layer before and after GELU;
    with a gate also both of what is multiplied. The inputs of attention and of the feed-forward layer are whole on each
    tensor rank. Norms are fused, as on a GPU.

    With dim h, as many heads of keys and feed-forward of 4h these are 16h values, 32h bytes in bf16: Korthikanti's 34h
    without two masks of dropout."""
    dim, width, tp = model.dim, BYTES[compute], parallel.tp
    shared = _norms_bytes(model, compute) + _heads_bytes(model, compute) + _square_bytes(model, compute, length)
    shared += dim * width if model.x0 or model.skips else 0  # what is mixed, beside the mix
    shared += 2 * dim if model.dropout > 0 else 0  # masks, a byte each
    turns = 2 * (model.turned_dim // 2) * max(4, width)  # cosines and sines, on each rank
    kept = shared / tp + turns + _attention_bytes(model, compute, tp) + dim * width
    if model.routed(layer):
        kept += _experts_bytes(model, compute, parallel)
    else:
        kept += _widened(model) * model.feedforward_dim * width / tp + dim * width
    return kept + context_bytes(model, parallel, compute)


def _widened(model: ModelConfig) -> int:
    """What a feed-forward layer keeps of its own width: before and after the activation, and with a gate the other
    factor and their product."""
    return 4 if model.gated else 2


def _experts_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """A layer with experts keeps the router's input and scores in float32 or wider, the numbers of the chosen experts
    and the steps to their weights; for each of these a row in and out of its expert and what a feed-forward layer keeps
    of its width, and where the row went, twice where it went to another rank; and what the shared experts keep.

    As many rows come to a rank as go from it, as with even loads."""
    moe, dim, width, wide = model.moe, model.dim, BYTES[compute], max(4, BYTES[compute])
    router = dim + moe.experts + moe.top_k  # its input, scores, the last weights
    router += moe.top_k + 1 if moe.normalize else 0  # the weights before, and their sum
    router += 1 if moe.balance is not Balance.none else 0  # the sum of the scores
    router += moe.experts + 1 if moe.z_loss > 0 else 0  # logits, and their log-sum
    hidden = _widened(model) * model.expert_dim * width
    rows = moe.top_k * (2 * dim * width + hidden + INDEX_BYTES + _places_bytes(parallel))
    kept = router * wide + rows + moe.shared * hidden
    kept += moe.top_k if moe.capacity_factor is not None else 0  # which are within it
    same = parallel.tp == 1 and width == wide  # the shared experts' input is the router's
    return kept / parallel.tp + (dim * width if moe.shared and not same else 0)


def _places_bytes(parallel: ParallelConfig) -> int:
    """Where a row comes from and goes: among those sorted by expert, and among those that come from other ranks."""
    return (4 if parallel.ep > 1 else 2) * INDEX_BYTES


def recomputed_block_bytes(
    model: ModelConfig,
    activations: ActivationsConfig,
    compute: Dtype,
    layer: int,
    parallel: ParallelConfig = ALONE,
    length: int = 0,
) -> float:
    """A block that is computed again keeps its input, what attention gave, and what was scattered over tp; where it is
    selective also what every matrix product gave, which those before a scatter give whole. Where experts are apart it
    keeps its input alone, or selectively also what its pieces hand to each other."""
    dim, width, tp = model.dim, BYTES[compute], parallel.tp
    kept = stream_bytes(model, compute, tp)
    if keeps_nothing(activations, model, parallel, layer):
        return kept
    bent = model.attention_softcap is not None
    kept += _attention_bytes(model, compute, tp) if model.attention not in NOT_KEPT and not bent else 0
    kept += cut_parts(model, layer) * dim * width / tp if tp > 1 else 0
    if settled(activations, model) is Recompute.selective:
        kept += _projected(model) * width / tp + dim * width
        kept += (model.query_dim + model.heads * length) * width / tp if bent else 0  # attention is two products
        kept += _feedforward_products(model, compute, layer, tp)
        kept += _handed_on(model, compute, parallel) if experts_apart(model, parallel) and model.routed(layer) else 0
    return kept


def _feedforward_products(model: ModelConfig, compute: Dtype, layer: int, tp: int) -> float:
    """What the matrix products of a feed-forward layer, or of router and experts, give."""
    moe, width, widening = model.moe, BYTES[compute], 1 + model.gated
    if not model.routed(layer):
        return widening * model.feedforward_dim * width / tp + model.dim * width
    rows = (moe.shared + moe.top_k) * widening * model.expert_dim + moe.top_k * model.dim
    return (moe.experts * max(4, width) + rows * width) / tp + (model.dim * width if moe.shared else 0)


def _handed_on(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """What the pieces of a block (parallel.pieces) hand to each other beside products: what the router takes, and for
    each chosen expert a row, its places and its weight; and what a norm at the end takes, which is in no piece."""
    row, wide = model.dim * BYTES[compute], max(4, BYTES[compute])
    normed = row + wide if model.norm_place is not NormPlace.before else 0
    return (row + model.moe.top_k * (row + _places_bytes(parallel) + wide) + normed) / parallel.tp


def head_bytes(model: ModelConfig, compute: Dtype, tp: int = 1, waits: bool = False) -> float:
    """At the peak there are the last norm's input and output, and of the scores three copies in float32 or wider: the
    scores, their exponentials and the gradient; with a soft-cap and a z-loss one more each. While it waits for its
    backward pass only the exponentials are left of the three."""
    copies = (1 if waits else 3) + (model.logit_softcap is not None) + (model.z_loss > 0)
    scores = copies * model.padded_vocab_size * max(4, BYTES[compute])
    return scores / tp + stream_bytes(model, compute, tp) + model.dim * BYTES[compute]


def running_bytes(
    model: ModelConfig,
    stage: Stage,
    activations: ActivationsConfig,
    compute: Dtype,
    parallel: ParallelConfig = ALONE,
    length: int = 0,
) -> float:
    """Of a micro-batch whose backward pass runs: what all blocks keep with the head's, or with what is computed again
    at once, if that is more."""
    kept, again = kept_bytes(model, activations, compute, parallel, stage.layers, length)
    return kept + max(head_bytes(model, compute, parallel.tp) if stage.last else 0.0, again)


def waiting_bytes(
    model: ModelConfig,
    stage: Stage,
    activations: ActivationsConfig,
    compute: Dtype,
    parallel: ParallelConfig = ALONE,
    length: int = 0,
) -> float:
    """Of a micro-batch that has gone through a stage and waits for its backward pass, with what it handed on."""
    kept, _ = kept_bytes(model, activations, compute, parallel, stage.layers, length)
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
    length: int = 0,
) -> tuple[float, float]:
    """What blocks keep, all or those of `layers`, and the most that comes on top when some of it is computed again in
    backward. length: of sequences whose scores or masks are kept."""
    layers = range(model.layers) if layers is None else layers
    mode, tp = settled(activations, model), parallel.tp
    whole = {layer: block_bytes(model, compute, layer, parallel, length) for layer in layers}
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
            part[layer] = recomputed_block_bytes(model, activations, compute, layer, parallel, length)
        kept, again = sum(part.values()), max(whole[layer] - part[layer] for layer in layers)
    tables = sum(model.value_table(layer) is not None for layer in layers)
    vectors = tables * 2 * model.key_value_dim * BYTES[compute] / tp  # and what they are mixed with
    return kept + vectors, max(again, 0.0)
