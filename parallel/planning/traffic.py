"""What a training step moves between ranks, from a config alone: the formulas of docs/parallelism.md. No torch here.

tests/parallel/test_traffic.py holds each against the collectives that are really made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from models.config import ModelConfig
from models.shapes import Shapes, block_shapes, parameter_shapes, root_shapes
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute, Reduce, Strategy
from parallel.planning.layout import (
    BYTES,
    as_sharded,
    master_bytes,
    padded_shard,
    reshards_to,
    shard_shapes,
    tensor_cut,
    tensor_shapes,
    values,
)
from parallel.recomputation import recomputed_layers, segment_borders, settled

COUNT_BYTES = 8  # of the number of predicted tokens, a float64
ALL, BLOCKS, ALIKE = "all", "blocks", "norms, positions, biases"


class Collective(Enum):
    """A kind of collective. What one of N ranks sends is that of a ring, the least any algorithm can do with
    (Chan et al. 2007, Collective communication: theory, practice, and experience)."""

    all_reduce = "all-reduce"  # 2(N-1)/N of the buffer
    all_gather = "all-gather"  # (N-1)/N of the gathered buffer
    reduce_scatter = "reduce-scatter"  # (N-1)/N of the buffer that is scattered


@dataclass(frozen=True)
class Batch:
    """Of one rank and step."""

    micro_batch: int  # sequences at once
    accumulation: int  # micro-batches of a step
    sequence_length: int


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
) -> list[Traffic]:
    """All collectives of a training step over axes of more than one rank. `compute`: settled, not auto. `tensor_rank`,
    `shard_rank`: where sizes do not divide, later ranks along tp and dp_shard move less. Raises ValueError while the
    vocabulary is not known."""
    found = [*_tokens(parallel)]
    if parallel.torch_ddp:
        found += _ddp(model, parallel, compute)
    elif parallel.strategy is not Strategy.single:
        found += _sharded(model, as_sharded(parallel), compute, reduce, batch, tensor_rank)
    if parallel.tp > 1:
        found += _tensor(model, parallel, compute, batch, activations, shard_rank)
    found += _norm(model, parallel, compute)
    return [entry for entry in found if entry.ranks > 1]


def _tokens(parallel: ParallelConfig) -> Iterator[Traffic]:
    """The number of predicted tokens, summed over ranks that see different sequences."""
    for axis in ("dp_replicate", "dp_shard"):
        ranks = getattr(parallel, axis)
        yield Traffic(axis, ranks, Collective.all_reduce, "predicted tokens", "loss", 1, COUNT_BYTES)


def _norm(model: ModelConfig, parallel: ParallelConfig, compute: Dtype) -> Iterator[Traffic]:
    """The square of the gradient's norm: one number for each way in which gradients are cut, summed over the axes of
    that cut."""
    cuts = {tensor_cut(name) for name in parameter_shapes(model)} if parallel.tp > 1 else {None}
    for axis, number in (("dp_shard", len(cuts)), ("tp", len(cuts - {None}))):
        ranks, size = getattr(parallel, axis), number * master_bytes(compute)
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


def _ddp(model: ModelConfig, parallel: ParallelConfig, compute: Dtype) -> Iterator[Traffic]:
    """Every gradient is summed once a step, in the masters' dtype: a rank sends 2(N-1)/N times the gradient's bytes."""
    sizes = buckets(parameter_shapes(model), master_bytes(compute), parallel.bucket_cap_mb)
    ranks = parallel.dp_replicate
    yield Traffic("dp_replicate", ranks, Collective.all_reduce, "gradients", ALL, len(sizes), sum(sizes))


def _sharded(
    model: ModelConfig, parallel: ParallelConfig, compute: Dtype, reduce: Dtype, batch: Batch, tensor_rank: int
) -> Iterator[Traffic]:
    """FSDP2. A unit is a block, or the root: embedding, last norm and head.

    Parameters, in the compute dtype: a unit is gathered in forward in each micro-batch, or only in the first of a step
    where it stays whole after backward. A block that is resharded after forward is gathered again in each backward,
    from as many ranks as it was resharded to; the root never is. Gradients, in the reduce dtype: reduce-scattered over
    shards in each micro-batch or once a step, then all-reduced over replicas once a step."""
    shards, replicas, layers = parallel.dp_shard, parallel.dp_replicate, model.layers
    of_layers = [block_shapes(model, layer) for layer in range(layers)]
    blocks = sum(padded_shard(tensor_shapes(shapes, parallel.tp, tensor_rank), shards) for shapes in of_layers)
    root = padded_shard(tensor_shapes(root_shapes(model), parallel.tp, tensor_rank), shards)
    shard, units = blocks + root, layers + 1

    forwards = batch.accumulation if parallel.reshard_after_backward else 1
    size = forwards * shards * shard * BYTES[compute]
    yield Traffic("dp_shard", shards, Collective.all_gather, "parameters", ALL, units * forwards, size)
    again = reshards_to(parallel)
    if again is not None:
        number = layers * batch.accumulation
        size = batch.accumulation * shards * blocks * BYTES[compute]
        yield Traffic("dp_shard", again, Collective.all_gather, "parameters for backward", BLOCKS, number, size)

    times = reductions(parallel, batch)
    size = times * shards * shard * BYTES[reduce]
    yield Traffic("dp_shard", shards, Collective.reduce_scatter, "gradients", ALL, units * times, size)
    yield Traffic("dp_replicate", replicas, Collective.all_reduce, "gradients", ALL, units, shard * BYTES[reduce])


def reductions(parallel: ParallelConfig, batch: Batch) -> int:
    """How many times a step FSDP2 sums gradients over shards: once where asked for, and by default where parameters
    stay whole in the step; else in each micro-batch."""
    by_default = parallel.reduce is Reduce.auto and parallel.reshard_after_forward is False
    return 1 if parallel.reduce is Reduce.step or by_default else batch.accumulation


def _again(model: ModelConfig, activations: ActivationsConfig) -> tuple[int, int]:
    """Gathers and scatters of the stream that backward makes again. A block that is computed again gathers for
    attention and for the feed-forward layer; what was scattered is kept. A segment keeps nothing, and scatters again
    but for its last, whose result no gradient needs."""
    if settled(activations, model) is Recompute.segments:
        segments = len(segment_borders(activations, model.layers)) - 1
        return 2 * model.layers, 2 * model.layers - segments
    return 2 * len(recomputed_layers(activations, model)), 0


def _tensor(
    model: ModelConfig,
    parallel: ParallelConfig,
    compute: Dtype,
    batch: Batch,
    activations: ActivationsConfig,
    shard_rank: int,
) -> Iterator[Traffic]:
    """Tensor parallelism with the stream between parts cut along the sequence (Korthikanti et al. 2022, 4.2.2).

    Attention and the feed-forward layer each gather the stream and scatter what they add to it, the embedding scatters
    and the head gathers; in backward a gather is a reduce-scatter and the other way round. The loss needs the largest
    score of each token, then the sum of exponentials and the label's score. The gradients of parameters that are whole
    on each rank are summed together, once a step
    (parallel.gradients.sum_alike)."""
    ranks, tokens = parallel.tp, batch.micro_batch * batch.sequence_length
    stream = tokens * model.dim * BYTES[compute]
    collectives = (Collective.all_gather, Collective.reduce_scatter)
    for collective, again in zip(collectives, _again(model, activations), strict=True):
        number = (4 * model.layers + 2 + again) * batch.accumulation
        yield Traffic("tp", ranks, collective, "activations", ALL, number, number * stream)
    number, size = 2 * batch.accumulation, 3 * tokens * batch.accumulation * max(4, BYTES[compute])
    yield Traffic("tp", ranks, Collective.all_reduce, "token losses", "head", number, size)
    whole = {name: shape for name, shape in parameter_shapes(model).items() if tensor_cut(name) is None}
    size = values(shard_shapes(whole, parallel.dp_shard, shard_rank)) * master_bytes(compute)
    yield Traffic("tp", ranks, Collective.all_reduce, "gradients", ALIKE, 1, size)
