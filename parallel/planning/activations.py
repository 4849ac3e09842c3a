"""What a micro-batch keeps for its backward pass, from a config alone. No torch here.

As Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, 4.1) count it, adapted to
fused attention, which keeps its output and a log-sum-exp a head in place of the square of scores, to grouped heads and
to each dtype. All are bytes for one token on one of `tp` ranks. parallel: the layout, by default that of one rank."""

from dataclasses import dataclass, field
from itertools import pairwise

from models.config import Balance, ModelConfig, Norm, NormPlace
from models.parts import PARTS, part_bytes
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute, experts_apart
from parallel.planning.attention import attended, attention_bytes, projected, result_bytes
from parallel.planning.layout import BYTES, INDEX_BYTES, cut_parts
from parallel.planning.stages import Order, Stage
from parallel.recomputation import NOT_KEPT, keeps_nothing, recomputed_layers, segment_borders, settled


@dataclass(frozen=True)
class How:
    """How a model is run. length: of sequences whose scores or masks are kept."""

    activations: ActivationsConfig
    compute: Dtype
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # of one rank
    length: int = 0

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return BYTES[self.compute]

    @property
    def tp(self) -> int:
        return self.parallel.tp


def stream_bytes(model: ModelConfig, compute: Dtype, tp: int = 1) -> float:
    """The stream between blocks: a rank has its share of the sequence."""
    return model.dim * BYTES[compute] / tp


def _norms_bytes(model: ModelConfig, compute: Dtype) -> float:
    """The inputs of a block's norms with mean and deviation, or the root of the mean square."""
    width, number = BYTES[compute], 4 if model.norm_place is NormPlace.both else 2
    return number * (model.dim * width + (2 * width if model.norm is Norm.layernorm else max(4, width)))


def block_bytes(model: ModelConfig, how: How, layer: int) -> float:
    """A block of which nothing is computed again keeps the inputs of its norms, those of attention and of the
    feed-forward layer, queries, keys and values, attention's output, and the feed-forward layer before and after GELU;
    with a gate also both of what is multiplied. The inputs of attention and of the feed-forward layer are whole on each
    tensor rank. Norms are fused, as on a GPU.

    With dim h, as many heads of keys and feed-forward of 4h these are 16h values, 32h bytes in bf16: Korthikanti's 34h
    without two masks of dropout."""
    dim, width, tp = model.dim, how.width, how.tp
    shared = _norms_bytes(model, how.compute)
    shared += dim * width if model.x0 or model.skips else 0  # what is mixed, beside the mix
    shared += 2 * dim if model.dropout > 0 else 0  # masks, a byte each
    attention, feedforward = (part_bytes(model, name, layer, width, tp) for name in PARTS)
    if attention is None:
        attention = attention_bytes(model, how.compute, how.parallel, how.length)
    if model.routed(layer):
        feedforward = _experts_bytes(model, how.compute, how.parallel)
    elif feedforward is None:
        feedforward = _widened(model) * model.feedforward_dim * width / tp + dim * width
    return shared / tp + attention + feedforward


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


def recomputed_block_bytes(model: ModelConfig, how: How, layer: int) -> float:
    """A block that is computed again keeps its input, what attention gave, and what was scattered over tp; where it is
    selective also what every matrix product gave, which those before a scatter give whole. Where experts are apart it
    keeps its input alone, or selectively also what its pieces hand to each other."""
    compute, parallel, tp = how.compute, how.parallel, how.tp
    kept = stream = stream_bytes(model, compute, tp)
    if keeps_nothing(how.activations, model, parallel, layer):
        return kept
    bent = model.attention_softcap is not None
    kept += result_bytes(model, compute, parallel) if model.attention not in NOT_KEPT and not bent else 0
    kept += cut_parts(model, layer) * stream if tp > 1 else 0
    if settled(how.activations, model) is Recompute.selective:
        kept += _attention_products(model, compute, layer, tp, how.length)
        kept += _feedforward_products(model, compute, layer, tp)
        kept += _handed_on(model, compute, parallel) if experts_apart(model, parallel) and model.routed(layer) else 0
    return kept


def left_bytes(model: ModelConfig, how: How, layer: int) -> float:
    """What a block keeps that is computed again by itself or not at all, or of which torch chooses what is kept."""
    if layer in recomputed_layers(how.activations, model):
        return recomputed_block_bytes(model, how, layer)
    whole = block_bytes(model, how, layer)
    if settled(how.activations, model) is not Recompute.budget:
        return whole
    stream = stream_bytes(model, how.compute, how.tp)
    return stream + how.activations.budget * (whole - stream)


def _attention_products(model: ModelConfig, compute: Dtype, layer: int, tp: int, length: int) -> float:
    """What the matrix products of attention give, which with bent scores is two itself. A user's part is counted as if
    nothing of it were computed again."""
    own = part_bytes(model, "attention", layer, BYTES[compute], tp)
    if own is not None:
        return own
    products = projected(model)
    products += attended(model) + model.heads * length if model.attention_softcap is not None else 0
    return products * BYTES[compute] / tp + model.dim * BYTES[compute]


def _feedforward_products(model: ModelConfig, compute: Dtype, layer: int, tp: int) -> float:
    """What the matrix products of a feed-forward layer, or of router and experts, give."""
    moe, width, widening = model.moe, BYTES[compute], 1 + model.gated
    if not model.routed(layer):
        own = part_bytes(model, "feedforward", layer, width, tp)
        if own is not None:
            return own
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


def running_bytes(model: ModelConfig, stage: Stage, how: How) -> float:
    """Of a micro-batch whose backward pass runs: what all blocks keep with the head's, or with what is computed again
    at once, if that is more. What further tokens need is gone before a block of the stage is computed again."""
    kept, again = kept_bytes(model, how, stage.layers)
    if not stage.last:
        return kept + again
    further, again_further = further_bytes(model, how)
    return kept + max(further + max(head_bytes(model, how.compute, how.tp), again_further), again)


def waiting_bytes(model: ModelConfig, stage: Stage, how: How) -> float:
    """Of a micro-batch that has gone through a stage and waits for its backward pass, with what it handed on."""
    kept, _ = kept_bytes(model, how, stage.layers)
    if stage.last:
        further, _ = further_bytes(model, how)
        return kept + further + head_bytes(model, how.compute, how.tp, waits=True)
    return kept + model.stream_tensors(stage.layers.stop) * stream_bytes(model, how.compute, how.tp)


def further_bytes(model: ModelConfig, how: How) -> tuple[float, float]:
    """What all that predicts further tokens keeps until its backward pass, each with the head's part, and the most that
    comes on top when a block of it is computed again.

    Of each its tokens and labels; the vectors of the tokens, and the roots of both norms; the normalized, one behind
    the other. What the norms behind take and give is the head's."""
    dim, width, tp, blocks = model.dim, how.width, how.tp, model.all_blocks[model.layers :]
    numbers = 2 * (2 * width if model.norm is Norm.layernorm else max(4, width))
    joined = 2 * INDEX_BYTES + (3 * dim * width + numbers) / tp
    part = {layer: left_bytes(model, how, layer) for layer in blocks}
    again = max((block_bytes(model, how, layer) - part[layer] for layer in blocks), default=0.0)
    return sum(part.values()) + len(blocks) * (joined + head_bytes(model, how.compute, tp, waits=True)), max(again, 0.0)


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


def kept_bytes(model: ModelConfig, how: How, layers: range | None = None) -> tuple[float, float]:
    """What blocks keep, all or those of `layers`, and the most that comes on top when some of it is computed again in
    backward."""
    layers = range(model.layers) if layers is None else layers
    mode, activations = settled(how.activations, model), how.activations
    whole = {layer: block_bytes(model, how, layer) for layer in layers}
    stream = stream_bytes(model, how.compute, how.tp)
    if mode is Recompute.segments:
        borders = segment_borders(activations, len(layers))
        kept = (len(borders) - 1) * stream
        again = max(sum(whole[layer] for layer in layers[first:end]) for first, end in pairwise(borders))
    elif mode is Recompute.offload:
        # the one that runs, and its neighbour on the way
        kept, again = max(sum(whole[layer] for layer in layers[place : place + 2]) for place in range(len(layers))), 0.0
    else:
        part = {layer: left_bytes(model, how, layer) for layer in layers}
        kept, again = sum(part.values()), max(whole[layer] - part[layer] for layer in layers)
    tables = sum(model.value_table(layer) is not None for layer in layers)
    vectors = tables * 2 * model.key_value_dim * how.width / how.tp  # and what they are mixed with
    return kept + vectors, max(again, 0.0)
