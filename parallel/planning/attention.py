"""What attention keeps of each token for its backward pass, from a config alone. No torch here.

All are bytes on one of `tp` ranks."""

from models.backends import OF_ANY_WIDTH
from models.config import ModelConfig, Position, QKNorm
from parallel.config import Context, Dtype, ParallelConfig
from parallel.planning.layout import BYTES


def projected(model: ModelConfig) -> int:
    """Width of what the matrix products before attention give: queries, keys and values, and the narrow vectors of
    latent attention that they are made of."""
    latent = model.latent
    if latent.kv_rank == 0:
        return model.query_dim + 2 * model.key_value_dim
    narrow = latent.kv_rank + latent.rope_dim + (latent.q_rank or 0)
    return model.query_dim + narrow + model.heads * (latent.nope_dim + latent.value_dim)


def attended(model: ModelConfig) -> int:
    """Width of what the product behind attention takes."""
    return model.heads * model.value_size


def _filled_up(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether values are filled up to the width of keys, since a kernel knows only one."""
    exchanged = parallel.cp > 1 and parallel.context is not Context.gather
    return model.value_size < model.head_size and (exchanged or model.attention not in OF_ANY_WIDTH)


def attention_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig, length: int) -> float:
    """All of it. length: of sequences whose scores or masks are kept."""
    square = _square_bytes(model, compute, length) / parallel.tp
    one = _input_bytes(model, compute, parallel) + result_bytes(model, compute, parallel) + square
    return one + _copied_bytes(model, compute, parallel)


def result_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """Attention's output and, of a fused kernel, its log-sum-exp."""
    log_sums = model.heads * max(4, BYTES[compute]) if model.attention_softcap is None else 0
    width = model.query_dim if _filled_up(model, parallel) else attended(model)
    return (width * BYTES[compute] + log_sums) / parallel.tp


def _copied_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """What attention keeps beside that of one rank: keys and values of other ranks that share sequences; and its output
    once more for the projection, where it is put in order or cut to its width."""
    together = parallel.cp > 1 and parallel.context is not Context.ring
    others = parallel.cp - 1 if together and parallel.context is Context.gather else 0
    width = others * model.key_value_heads * (model.head_size + model.value_size)
    width += attended(model) if together or _filled_up(model, parallel) else 0
    return width * BYTES[compute] / parallel.tp


def _square_bytes(model: ModelConfig, compute: Dtype, length: int) -> float:
    """What attention keeps of each token's scores with so many others, where no fused kernel does without: the mask of
    a window, and bent scores twice in float32 or wider with what they are rounded to. Masks are those of one sequence,
    which those of a micro-batch share."""
    width, wide = BYTES[compute], max(4, BYTES[compute])
    if model.attention_softcap is not None:
        return length * (model.heads * (2 * wide + (width if width < wide else 0)) + 1)
    return length * width if model.window is not None and model.window < length else 0


def _input_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """Attention's input, queries, keys and values, with cosines and sines, which each rank has of every token."""
    turns = 2 * (model.turned_dim // 2) * max(4, BYTES[compute])
    if model.latent.kv_rank > 0:
        return turns + _latent_bytes(model, compute, parallel)
    return turns + model.dim * BYTES[compute] + _heads_bytes(model, compute) / parallel.tp


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
        kept = projected(model) + (queries if needed and model.key_value_heads < model.heads else 0)
    taken = both if rotary or normed else 0
    if bent:
        taken = (queries if rotary or normed else 0) + 2 * queries
    kept = (kept + taken) * width
    if of_all:
        kept += (both if copied else 0) * wide + (both * width if model.norm_weight else 0) + 2 * wide
    elif normed:
        kept += (model.heads + model.key_value_heads) * wide  # a root of a mean square each
    return kept


def _latent_bytes(model: ModelConfig, compute: Dtype, parallel: ParallelConfig) -> float:
    """Latent attention's input; the narrow vectors before their norms, with a root each, and after; queries, keys and
    values. Values lie among the keys they were made with, unless they are copied.

    Over tp the vectors after the norms are gathered, and the input only where queries are made of it."""
    latent, width, tp = model.latent, BYTES[compute], parallel.tp
    ranks = [latent.kv_rank] if latent.q_rank is None else [latent.kv_rank, latent.q_rank]
    before = (sum(ranks) + latent.rope_dim) * width + len(ranks) * max(4, width)
    values = latent.nope_dim + latent.value_dim
    if _filled_up(model, parallel):
        values = model.head_size
    elif model.attention_softcap is not None or parallel.cp > 1:
        values = latent.value_dim
    heads = model.heads * (2 * model.head_size + values) * width
    gathered = sum(ranks) + (model.dim if latent.q_rank is None and tp > 1 else 0)
    return (model.dim * width + before + heads) / tp + gathered * width
