"""What a training step moves between ranks, from a config alone: the formulas of docs/parallelism.md. No torch here.

tests/parallel/test_traffic.py holds each against the collectives that are really made."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import islice

from models.config import Balance, ModelConfig, NormPlace, QKNorm
from models.shapes import Shapes, has_gradient, in_experts, in_router, parameter_shapes
from parallel.config import (
    UNCOMPRESSED,
    ActivationsConfig,
    Compress,
    Compression,
    Context,
    Dtype,
    ParallelConfig,
    Recompute,
    Reduce,
    Strategy,
    experts_apart,
)
from parallel.planning.layout import (
    BYTES,
    INDEX_BYTES,
    as_sharded,
    cut_parts,
    experts_here,
    gathered,
    master_bytes,
    padded_shard,
    reshards_to,
    shard_shapes,
    tensor_cut,
    tensor_shapes,
    units,
    values,
    without_experts,
)
from parallel.planning.stages import (
    Order,
    Stage,
    as_scheduled,
    blocks_of,
    extrapolated,
    held_stages,
    order_of,
    stage_shapes,
    stages,
)
from parallel.recomputation import keeps_nothing, recomputed_layers, segment_borders, settled

COUNT_BYTES = 8  # of the number of predicted tokens, a float64
ROUNDED_BYTES = 2  # of a value of a gradient in bf16 or fp16
ALL, BLOCKS, EXPERTS, ALIKE = "all", "blocks", "experts", "norms, positions, biases"
RESIDENT = 3  # stages of a rank whose parameters torch's schedules keep gathered, those it comes to next


class Collective(Enum):
    """A kind of collective. What one of N ranks sends is that of a ring, the least any algorithm can do with
    (Chan et al. 2007, Collective communication: theory, practice, and experience)."""

    all_reduce = "all-reduce"  # 2(N-1)/N of the buffer
    all_gather = "all-gather"  # (N-1)/N of the gathered buffer
    reduce_scatter = "reduce-scatter"  # (N-1)/N of the buffer that is scattered
    all_to_all = "all-to-all"  # (N-1)/N of the buffer
    send = "send"  # to one other rank: the buffer, whatever N


@dataclass(frozen=True)
class Batch:
    """Of one rank and step."""

    micro_batch: int  # sequences at once
    accumulation: int  # micro-batches of a step
    sequence_length: int  # of each sequence, the tokens that a rank has


@dataclass(frozen=True)
class Rank:
    """What a rank runs in a step."""

    model: ModelConfig
    stages: list[Stage]  # those it holds
    parallel: ParallelConfig
    compute: Dtype
    batch: Batch
    activations: ActivationsConfig

    @property
    def blocks(self) -> list[int]:
        return [block for stage in self.stages for block in blocks_of(self.model, stage)]

    @property
    def routed(self) -> list[int]:
        return [block for block in self.blocks if self.model.routed(block)]

    @property
    def in_segments(self) -> bool:
        return settled(self.activations, self.model) is Recompute.segments

    @property
    def made_again(self) -> list[int]:
        """The blocks that backward computes again, one by one or in segments."""
        again = range(self.model.layers) if self.in_segments else recomputed_layers(self.activations, self.model)
        return [block for block in self.blocks if block in again]

    @property
    def whole_again(self) -> list[int]:
        """Those of which nothing is kept but what goes in: blocks of a segment, and those where experts are apart."""
        how = self.activations, self.model, self.parallel
        return [block for block in self.made_again if self.in_segments or keeps_nothing(*how, block)]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one training step. Logging, saving and scoring are not in each step, so not here.

    `buffer_bytes`: of the whole buffers (of an all-gather what comes out, of a reduce-scatter what goes in), summed
    over the `number` of collectives."""

    axis: str
    ranks: int  # of the group in which it happens
    collective: Collective
    what: str
    parts: str
    number: int
    buffer_bytes: int

    @property
    def only_numbers(self) -> bool:
        return self.buffer_bytes <= 8 * self.number

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a step."""
        if self.collective is Collective.send:
            return self.buffer_bytes
        share = (self.ranks - 1) / self.ranks
        return self.buffer_bytes * share * (2 if self.collective is Collective.all_reduce else 1)


def traffic(
    model: ModelConfig,
    parallel: ParallelConfig,
    compute: Dtype,
    reduce: Dtype,
    batch: Batch,
    activations: ActivationsConfig,
    tensor_rank: int = 0,
    shard_rank: int = 0,
    pipeline_rank: int = 0,
    compression: Compression = UNCOMPRESSED,
) -> list[Traffic]:
    """All collectives of a training step over axes of more than one rank, and what is sent from rank to rank.
    `compute`: settled, not auto. `tensor_rank`, `shard_rank`: where sizes do not divide, later ranks along tp and
    dp_shard move less. `pipeline_rank`: each has its own stages; where FSDP2 shares them out this imports torch.
    `compression`: with PowerSGD of a step after it has begun. Raises ValueError while the vocabulary is not known."""
    apart, activations = experts_apart(model, parallel), as_scheduled(activations, parallel)
    held = held_stages(model, parallel, pipeline_rank)
    rank = Rank(model, held, parallel, compute, batch, activations)
    shapes = {stage.index: stage_shapes(model, parallel, stage) for stage in held}
    together = {name: shape for of_stage in shapes.values() for name, shape in of_stage.items()}
    found = [*_tokens(parallel)]
    if parallel.torch_ddp:
        found += _ddp(model, parallel, compute, compression)
    elif parallel.strategy is not Strategy.single:
        often = gathers_of_step(shapes, as_sharded(parallel), batch, pipeline_rank)
        cut = {stage: tensor_shapes(of_stage, model, parallel.tp, tensor_rank) for stage, of_stage in shapes.items()}
        if apart:
            cut = {stage: without_experts(of_stage) for stage, of_stage in cut.items()}
            experts = {stage: experts_here(of_stage, parallel.ep) for stage, of_stage in shapes.items()}
            found += _experts(experts, as_sharded(parallel), compute, reduce, batch, pipeline_rank)
            found += _exchange(rank)
        found += _sharded(cut, often, as_sharded(parallel), compute, reduce, batch)
        found += _whole(model, together, parallel, compute)
    if parallel.tp > 1:
        found += _tensor(rank, together, shard_rank)
    if parallel.cp > 1:
        found += _context(rank)
        found += _further(rank)
    found += _whole_sequences(rank)
    if parallel.pp > 1:
        found += _stream(rank)
        mine = tensor_shapes(together, model, parallel.tp, tensor_rank)
        found += _shared(model, shard_shapes(mine, parallel.shards, shard_rank), parallel, compute)
    found += _norm(model, together, parallel, compute)
    return [entry for entry in found if entry.ranks > 1]


def _tokens(parallel: ParallelConfig) -> Iterator[Traffic]:
    """The number of predicted tokens, summed over ranks that see different sequences."""
    for axis, ranks in (("dp_replicate", parallel.copies), ("dp_shard", parallel.shards)):
        yield Traffic(axis, ranks, Collective.all_reduce, "predicted tokens", "loss", 1, COUNT_BYTES)


def _norm(model: ModelConfig, held: Shapes, parallel: ParallelConfig, compute: Dtype) -> Iterator[Traffic]:
    """The square of the gradient's norm: one number for each way in which gradients are cut, summed over the axes of
    that cut, and one for the stages of a pipeline. What has two names counts once."""
    counted = held.keys() - model.shared_parameters.keys()
    cuts = {tensor_cut(name, model) for name in _sharded_alike(counted)} if parallel.tp > 1 else {None}
    apart = experts_apart(model, parallel) and any(map(in_experts, counted))
    numbers = [
        ("dp_shard", parallel.shards, len(cuts)),
        ("tp", parallel.tp, len(cuts - {None})),
        ("expert_shard", parallel.expert_shards, int(apart)),
        ("ep", parallel.ep, int(apart)),
        ("pp", parallel.pp, 1),
    ]
    for axis, ranks, number in numbers:
        size = number * master_bytes(compute)
        if number > 0:
            yield Traffic(axis, ranks, Collective.all_reduce, "gradient norm", ALL, number, size)


def buckets(shapes: Shapes, value_bytes: int, cap_mb: float) -> list[int]:
    """Bytes of each of DDP's buckets. Gradients come in the reverse of the parameters' order, and a bucket is full when
    it reaches the cap (torch's compute_bucket_assignment_by_size, over the order of the first step). The gradients of a
    compiled block come in another order, so that the number may differ there, the sum never."""
    cap, found, filled = int(cap_mb * 1024 * 1024), [], 0
    for shape in reversed(shapes.values()):
        filled += math.prod(shape) * value_bytes
        if filled >= cap:
            found.append(filled)
            filled = 0
    return [*found, filled] if filled else found


def _ddp(model: ModelConfig, parallel: ParallelConfig, compute: Dtype, compression: Compression) -> Iterator[Traffic]:
    """Every gradient is summed once a step, in the masters' dtype: a rank sends 2(N-1)/N times the gradient's bytes; or
    in two bytes a value. With PowerSGD all left factors together, all right ones, and all that has none."""
    shapes = {name: shape for name, shape in parameter_shapes(model).items() if has_gradient(name, model)}
    each, ranks = master_bytes(compute), parallel.copies

    def gradients(what: str, parts: str, number: int, size: int) -> Traffic:
        return Traffic("dp_replicate", ranks, Collective.all_reduce, what, parts, number, size)

    if compression.kind is Compress.powersgd:
        cut = {name: factors for name, shape in shapes.items() if (factors := compression.factors(shape)) is not None}
        low = sum((rows + columns) * rank for rows, columns, rank in cut.values())
        whole = values({name: shape for name, shape in shapes.items() if name not in cut})
        yield gradients("factors of gradients", "matrices", 2 * bool(cut), low * each)
        yield gradients("gradients", "all else", 1, whole * each)
        return
    sizes = buckets(shapes, each, parallel.bucket_cap_mb)
    sent = each if compression.kind is Compress.none else ROUNDED_BYTES
    yield gradients("gradients", ALL, len(sizes), sum(sizes) // each * sent)


@dataclass
class Gathers:
    """How often a step gathers the parameters of a stage: of each unit from where they lie between steps, and of each
    block from what it was resharded to after forward."""

    first: int = 0
    again: int = 0


def gathers(order: Order, parallel: ParallelConfig) -> dict[int, Gathers]:
    """By stage. parallel: as_sharded."""
    found: dict[int, Gathers] = defaultdict(Gathers)
    gathered: dict[int, bool] = {}  # stages whose roots are whole, and whether their blocks are
    many = len({stage for _, stage in order}) > RESIDENT
    for place, (kind, stage) in enumerate(order):
        if many:
            near = _next_stages(order, place)
            gathered = {stage: whole for stage, whole in gathered.items() if stage in near}
        if stage not in gathered:
            found[stage].first += 1
        elif not gathered[stage]:
            found[stage].again += 1
        gathered[stage] = kind != "F" or reshards_to(parallel) is None
        if kind == "B" and parallel.reshard_after_backward:
            del gathered[stage]
    return found


def _next_stages(order: Order, place: int) -> list[int]:
    """The first RESIDENT different ones from a place in the order on."""
    found: list[int] = []
    for _, stage in islice(order, place, None):
        if stage not in found:
            found.append(stage)
        if len(found) == RESIDENT:
            break
    return found


def gathers_of_step(
    held: Iterable[int], parallel: ParallelConfig, batch: Batch, pipeline_rank: int
) -> dict[int, Gathers]:
    """Of the stages a rank holds. parallel: as_sharded."""

    @cache
    def of(micro_batches: int) -> dict[int, Gathers]:
        return gathers(order_of(parallel, micro_batches, pipeline_rank), parallel)

    def times(read: Callable[[Gathers], int], stage: int) -> int:
        return round(extrapolated(lambda count: read(of(count)[stage]), parallel, batch.accumulation))

    return {
        stage: Gathers(times(lambda found: found.first, stage), times(lambda found: found.again, stage))
        for stage in held
    }


def _sharded(
    held: dict[int, Shapes],
    often: dict[int, Gathers],
    parallel: ParallelConfig,
    compute: Dtype,
    reduce: Dtype,
    batch: Batch,
) -> Iterator[Traffic]:
    """FSDP2. A unit is a block, or the root of a stage: what is outside of its blocks, if there is anything.

    Parameters, in the compute dtype: a unit is gathered in forward in each micro-batch, or only in the first of a step
    where it stays whole after backward. A block that is resharded after forward is gathered again, from as many ranks
    as it was resharded to; the root never is. Gradients, in the reduce dtype: reduce-scattered over shards in each
    micro-batch or once a step, then all-reduced over replicas once a step."""
    shards, replicas = parallel.shards, parallel.copies
    times = reductions(parallel, batch)
    first = again = reduced = 0  # numbers of collectives
    gathered = gathered_again = shard = 0  # values of a rank's share
    for index, shapes in held.items():
        blocks, root = units(shapes)
        in_blocks, number = sum(padded_shard(block, shards) for block in blocks), len(blocks) + bool(root)
        of_stage = in_blocks + padded_shard(root, shards)
        first, gathered = first + often[index].first * number, gathered + often[index].first * of_stage
        again += often[index].again * len(blocks)
        gathered_again += often[index].again * in_blocks
        reduced, shard = reduced + number, shard + of_stage

    def gather(ranks: int, what: str, parts: str, number: int, share: int) -> Traffic:
        size = share * shards * BYTES[compute]
        return Traffic("dp_shard", ranks, Collective.all_gather, what, parts, number, size)

    yield gather(shards, "parameters", ALL, first, gathered)
    if again > 0:
        yield gather(reshards_to(parallel) or shards, "parameters again", BLOCKS, again, gathered_again)
    size = times * shards * shard * BYTES[reduce]
    yield Traffic("dp_shard", shards, Collective.reduce_scatter, "gradients", ALL, reduced * times, size)
    yield Traffic("dp_replicate", replicas, Collective.all_reduce, "gradients", ALL, reduced, shard * BYTES[reduce])


def _whole(model: ModelConfig, held: Shapes, parallel: ParallelConfig, compute: Dtype) -> Iterator[Traffic]:
    """The gradients of routers, which FSDP2 leaves alone: once a step, in the masters' dtype
    (parallel.gradients.sum_whole)."""
    size = values({name: shape for name, shape in held.items() if in_router(name) and has_gradient(name, model)})
    if size > 0:
        for axis, ranks in (("dp_replicate", parallel.copies), ("dp_shard", parallel.shards), ("tp", parallel.tp)):
            size_bytes = size * master_bytes(compute)
            yield Traffic(axis, ranks, Collective.all_reduce, "gradients", "routers", 1, size_bytes)


def reductions(parallel: ParallelConfig, batch: Batch) -> int:
    """How many times a step FSDP2 sums gradients over shards: once where asked for, and by default where parameters
    stay whole in the step; else in each micro-batch."""
    by_default = parallel.reduce is Reduce.auto and parallel.reshard_after_forward is False
    return 1 if parallel.reduce is Reduce.step or by_default else batch.accumulation


def _experts(
    held: dict[int, Shapes], parallel: ParallelConfig, compute: Dtype, reduce: Dtype, batch: Batch, pipeline_rank: int
) -> Iterator[Traffic]:
    """Experts apart from their layer, those of each layer a unit of FSDP2 on their own view of the ranks: gathered and
    summed as blocks are (_sharded), but resharded to all their ranks or to none."""
    shards = parallel.expert_shards
    whole = replace(parallel, reshard_after_forward=parallel.reshard_after_forward is not False)
    often, times = gathers_of_step(held, whole, batch, pipeline_rank), reductions(parallel, batch)
    layers = {stage: units(shapes)[0] for stage, shapes in held.items()}
    number = sum(map(len, layers.values()))
    share = {stage: sum(padded_shard(unit, shards) for unit in of_stage) for stage, of_stage in layers.items()}

    def gather(what: str, times: dict[int, int]) -> Traffic:
        size = sum(times[stage] * share[stage] for stage in held) * shards * BYTES[compute]
        gathered = sum(times[stage] * len(layers[stage]) for stage in held)
        return Traffic("expert_shard", shards, Collective.all_gather, what, EXPERTS, gathered, size)

    yield gather("parameters", {stage: often[stage].first for stage in held})
    yield gather("parameters again", {stage: often[stage].again for stage in held})
    size = sum(share.values()) * BYTES[reduce]
    yield Traffic(
        "expert_shard", shards, Collective.reduce_scatter, "gradients", EXPERTS, times * number, times * shards * size
    )
    replicas = parallel.dp_replicate
    yield Traffic("dp_replicate", replicas, Collective.all_reduce, "gradients", EXPERTS, number, size)


def _exchange(rank: Rank) -> Iterator[Traffic]:
    """How many tokens each expert gets, then a row for each token and expert, there and back; the same rows' gradients
    in backward. What is computed again sends again, unless it is in pieces (selective). Each rank gets as many rows as
    it has, as with even loads."""
    model, parallel, batch, layers = rank.model, rank.parallel, rank.batch, len(rank.routed)
    again = len(set(rank.whole_again) & set(rank.routed))
    forward, backward = (layers + again) * batch.accumulation, layers * batch.accumulation
    tokens = batch.micro_batch * batch.sequence_length // parallel.tp
    rows = tokens * model.moe.top_k * model.dim * BYTES[rank.compute]

    def entry(what: str, number: int, size: int) -> Traffic:
        return Traffic("ep", parallel.ep, Collective.all_to_all, what, EXPERTS, number, number * size)

    yield entry("numbers of tokens", forward, model.moe.experts * INDEX_BYTES)
    yield entry("tokens", 2 * (forward + backward), rows)


def _whole_sequences(rank: Rank) -> Iterator[Traffic]:
    """Routers that balance or bound the loads of whole sequences gather the experts that tokens chose
    (parallel.expert.SharedSequences)."""
    moe, parallel, batch = rank.model.moe, rank.parallel, rank.batch
    asked = (moe.balance is Balance.sequence) + (moe.capacity_factor is not None)
    again = set(rank.made_again) & set(rank.routed)
    number = asked * (len(rank.routed) + len(again)) * batch.accumulation
    size = number * batch.micro_batch * batch.sequence_length * moe.top_k * INDEX_BYTES
    for axis, ranks, whole in (("tp", parallel.tp, size), ("cp", parallel.cp, parallel.cp * size)):
        if number > 0:
            yield Traffic(axis, ranks, Collective.all_gather, "chosen experts", "routers", number, whole)


def _sharded_alike(names: Iterable[str]) -> Iterator[str]:
    """Without routers, which are whole, and experts apart from their layer."""
    return (name for name in names if not in_router(name) and not in_experts(name))


def _again(rank: Rank) -> tuple[list[int], list[int]]:
    """Widths of what backward gathers and scatters again over tp. A block that is computed again gathers for each of
    its parts; what was scattered is kept. Where nothing is kept it scatters again, but for a feed-forward layer at the
    end of a block or segment, whose result no gradient needs unless it is normalized."""
    model = rank.model
    gathers = [width for layer in rank.made_again for width in gathered(model, layer)]
    ends = whole = rank.whole_again
    if rank.in_segments:
        borders = [(stage, segment_borders(rank.activations, len(stage.layers))[1:]) for stage in rank.stages]
        ends = [stage.layers[end - 1] for stage, of_stage in borders for end in of_stage]
    unneeded = sum(cut_parts(model, layer) == 2 for layer in ends) if model.norm_place is NormPlace.before else 0
    return gathers, [model.dim] * (sum(cut_parts(model, layer) for layer in whole) - unneeded)


def _tensor(rank: Rank, shapes: Shapes, shard_rank: int) -> Iterator[Traffic]:
    """Tensor parallelism with the stream between parts cut along the sequence (Korthikanti et al. 2022, 4.2.2).

    Attention and the feed-forward layer (with experts the shared ones) each gather the stream, latent attention narrow
    vectors (layout.gathered), and scatter what they add to it; the embedding scatters and the head gathers, both once
    more for each further token; in backward a gather is a reduce-scatter and the other way round. The loss needs the
    largest score of each token, then the sum of exponentials and the label's score. Norms over all heads sum a number a
    token of queries and one of keys, and the same in backward. The gradients of parameters that are whole on each rank
    are summed together, once a step (parallel.gradients.sum_alike)."""
    model, parallel, batch, blocks = rank.model, rank.parallel, rank.batch, rank.blocks
    ranks, tokens, width = parallel.tp, batch.micro_batch * batch.sequence_length, BYTES[rank.compute]
    heads = sum((1 + model.mtp) * stage.last for stage in rank.stages)
    scattered = sum(cut_parts(model, block) for block in blocks)
    ends = sum(stage.first + (1 + 2 * model.mtp) * stage.last for stage in rank.stages)
    each = [size for block in blocks for size in gathered(model, block)] + [model.dim] * (scattered + ends)
    collectives = (Collective.all_gather, Collective.reduce_scatter)
    for collective, again in zip(collectives, _again(rank), strict=True):
        number = len(each + again) * batch.accumulation
        size = sum(each + again) * tokens * width * batch.accumulation
        yield Traffic("tp", ranks, collective, "activations", ALL, number, size)
    if heads > 0:
        number, size = 2 * heads * batch.accumulation, 3 * heads * tokens * batch.accumulation * max(4, width)
        yield Traffic("tp", ranks, Collective.all_reduce, "token losses", "head", number, size)
    whole = {name: shapes[name] for name in _sharded_alike(shapes) if tensor_cut(name, model) is None}
    if whole:
        size = values(shard_shapes(whole, parallel.shards, shard_rank)) * master_bytes(rank.compute)
        yield Traffic("tp", ranks, Collective.all_reduce, "gradients", ALIKE, 1, size)
    if model.qk_norm is QKNorm.all:
        number = 2 * (2 * len(blocks) + len(rank.made_again)) * batch.accumulation
        size = number * tokens * max(4, width)
        yield Traffic("tp", ranks, Collective.all_reduce, "squares of queries, keys", BLOCKS, number, size)


def _context(rank: Rank) -> Iterator[Traffic]:
    """What attention moves between ranks that share sequences, of each block and micro-batch.

    gather: keys and values, and in backward their gradients scattered; the others fill values up to the width of keys.
    ulysses: queries, keys and values to ranks of
    heads, and the result back; the same in backward. ring: keys and values to every other rank; in backward again, and
    beside them their gradients, in float32 or wider, one hop further. A block that is computed again does forward's
    part again; the ring's result is kept, unless nothing is."""
    model, parallel, batch, compute = rank.model, rank.parallel, rank.batch, rank.compute
    ranks, layers = parallel.cp, rank.blocks
    ring = parallel.context is Context.ring
    again = len(rank.whole_again if ring else rank.made_again)
    forward, backward = (len(layers) + again) * batch.accumulation, len(layers) * batch.accumulation
    tokens = batch.micro_batch * batch.sequence_length
    pairs = 2 * tokens * model.key_value_dim // parallel.tp  # values of a rank's keys and values
    width, wide = BYTES[compute], max(4, BYTES[compute])

    def entry(collective: Collective, what: str, number: int, size: int) -> Traffic:
        return Traffic("cp", ranks, collective, what, ALL, number, size)

    if parallel.context is Context.gather:
        own = model.key_value_heads * (model.head_size + model.value_size) // parallel.tp
        whole = ranks * tokens * own * width
        yield entry(Collective.all_gather, "keys, values", forward, forward * whole)
        yield entry(Collective.reduce_scatter, "their gradients", backward, backward * whole)
    elif parallel.context is Context.ulysses:
        heads, number = pairs + 2 * tokens * model.query_dim // parallel.tp, forward + backward
        yield entry(Collective.all_to_all, "heads", 2 * number, number * heads * width)
    else:
        hops = ranks - 1
        yield entry(
            Collective.send, "keys, values", (forward + backward) * hops, (forward + backward) * hops * pairs * width
        )
        yield entry(Collective.send, "their gradients", backward * ranks, backward * ranks * pairs * wide)


def _further(rank: Rank) -> Iterator[Traffic]:
    """What predicts further tokens gathers tokens and labels of whole sequences, once a micro-batch
    (parallel.context.CutSequences)."""
    parallel, batch = rank.parallel, rank.batch
    if rank.model.mtp > 0 and any(stage.last for stage in rank.stages):
        number = 2 * batch.accumulation
        size = number * parallel.cp * batch.micro_batch * batch.sequence_length * INDEX_BYTES
        yield Traffic("cp", parallel.cp, Collective.all_gather, "tokens, labels", "further tokens", number, size)


def _stream(rank: Rank) -> Iterator[Traffic]:
    """What a stage hands to the next, of each micro-batch, and its gradient to the one before. Nothing is sent between
    stages on the same rank."""
    model, parallel, batch, held = rank.model, rank.parallel, rank.batch, rank.stages
    cut = stages(model, parallel)
    size = batch.micro_batch * batch.sequence_length // parallel.tp * model.dim * BYTES[rank.compute]
    forward = [(stage, cut[stage.index + 1]) for stage in held if not stage.last]
    backward = [(cut[stage.index - 1], stage) for stage in held if not stage.first]
    for what, borders in (("activations", forward), ("their gradients", backward)):
        tensors = sum(model.stream_tensors(after.layers[0]) for before, after in borders if before.rank != after.rank)
        number = tensors * batch.accumulation
        if number > 0:
            yield Traffic("pp", parallel.pp, Collective.send, what, ALL, number, number * size)


def _shared(model: ModelConfig, held: Shapes, parallel: ParallelConfig, compute: Dtype) -> Iterator[Traffic]:
    """A parameter of which two ranks have a copy: each sends its gradient to the other (parallel.pipeline.Shared).
    held: what this rank has, of its own shape."""
    here = [{first, second} & held.keys() for second, first in model.shared_parameters.items()]
    alone = [name for names in here for name in names if len(names) == 1]
    if alone:
        size = values({name: held[name] for name in alone}) * master_bytes(compute)
        yield Traffic("pp", parallel.pp, Collective.send, "gradients", "shared parameters", len(alone), size)
