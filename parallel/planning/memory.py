"""What a rank holds in memory during a training step, from a config alone. No torch here.

The bytes of parameters, gradients and moments are exact. What is gathered, what waits to be reduced and what is kept
for backward are estimates of the peak, without the allocator's fragmentation, CUDA's context and the kernels' own."""

from dataclasses import dataclass
from itertools import pairwise

from models.config import ModelConfig
from models.shapes import Shapes
from parallel.config import (
    UNCOMPRESSED,
    ActivationsConfig,
    Compress,
    Compression,
    Dtype,
    ParallelConfig,
    Recompute,
    Strategy,
)
from parallel.planning.activations import context_bytes, peak_bytes, running_bytes, waiting_bytes
from parallel.planning.layout import (
    BYTES,
    as_sharded,
    master_bytes,
    padded_shard,
    reshards_to,
    shard_shapes,
    tensor_shapes,
    units,
    values,
)
from parallel.planning.stages import as_scheduled, extrapolated, held_stages, order_of, stage_shapes
from parallel.planning.traffic import ROUNDED_BYTES, Batch, reductions
from parallel.recomputation import segment_borders, settled


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. With parallel.cpu_offload the first three wait in the CPU's memory."""

    parameters: int  # masters
    gradients: int  # of the masters
    optimizer: int  # the moments
    copies: int  # parameters in the compute dtype, and those gathered at once
    reduction: int  # gradients that are not yet summed; PowerSGD's errors
    activations: int

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.copies + self.reduction + self.activations


def held_values(
    model: ModelConfig, parallel: ParallelConfig, shard_rank: int = 0, tensor_rank: int = 0, pipeline_rank: int = 0
) -> int:
    """Values of the parameters that a rank holds. Where sizes do not divide, the first rank of dp_shard and tp holds
    the most; along pp each has its own stages."""
    shapes = _held(model, parallel, pipeline_rank, tensor_rank).values()
    return sum(values(shard_shapes(of_stage, parallel.shards, shard_rank)) for of_stage in shapes)


def _held(model: ModelConfig, parallel: ParallelConfig, pipeline_rank: int, tensor_rank: int = 0) -> dict[int, Shapes]:
    """By stage of a rank what it has of each parameter before data parallelism cuts it further."""
    return {
        stage.index: tensor_shapes(stage_shapes(model, parallel, stage), parallel.tp, tensor_rank)
        for stage in held_stages(model, parallel, pipeline_rank)
    }


def memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    compute: Dtype,
    reduce: Dtype,
    batch: Batch,
    activations: ActivationsConfig,
    moments: int,
    pipeline_rank: int = 0,
    compression: Compression = UNCOMPRESSED,
) -> Memory:
    """The peak of the first rank along dp_shard and tp. `moments`: the optimizer's values for each of the parameters';
    AdamW 2, SGD 1. Raises ValueError while the vocabulary is not known, and for a model with experts. With a pipeline
    this imports torch."""
    if model.moe.experts > 0:
        raise ValueError("what experts keep for backward has no formula yet")
    masters = held_values(model, parallel, pipeline_rank=pipeline_rank) * master_bytes(compute)
    shapes = _held(model, parallel, pipeline_rank)
    kept = as_scheduled(activations, parallel)
    if parallel.strategy is Strategy.single or parallel.torch_ddp:
        copies, reduction = _whole(shapes, batch, pipeline_rank, parallel, compute)
        reduction += _compressed(shapes[0], compute, compression) if parallel.torch_ddp else 0
    else:
        copies, reduction = _sharded(shapes, as_sharded(parallel), compute, reduce, batch, _at_once(model, kept))
    tokens, tp = batch.micro_batch * batch.sequence_length, parallel.tp
    stages = held_stages(model, parallel, pipeline_rank)
    context = context_bytes(model, parallel, compute)
    waiting = {stage.index: tokens * waiting_bytes(model, stage, kept, compute, tp, context) for stage in stages}
    running = {stage.index: tokens * running_bytes(model, stage, kept, compute, tp, context) for stage in stages}
    found = _peak(parallel, batch, pipeline_rank, waiting, running)
    return Memory(masters, masters, moments * masters, copies, reduction, round(found))


def _peak(
    parallel: ParallelConfig,
    batch: Batch,
    pipeline_rank: int,
    waiting: dict[int, float],
    running: dict[int, float],
) -> float:
    """peak_bytes of a step."""

    def peak(micro_batches: int) -> float:
        return peak_bytes(order_of(parallel, micro_batches, pipeline_rank), waiting, running)

    return extrapolated(peak, parallel, batch.accumulation)


def _whole(
    shapes: dict[int, Shapes], batch: Batch, pipeline_rank: int, parallel: ParallelConfig, compute: Dtype
) -> tuple[int, int]:
    """LowPrecision copies every parameter for the whole pass of a micro-batch, and the gradients of the copies arrive
    at the masters at its end; DDP may have its buckets beside the gradients."""
    held = {stage: values(of_stage) for stage, of_stage in shapes.items()}
    cast = BYTES[compute] < master_bytes(compute)
    low = {stage: number * BYTES[compute] if cast else 0.0 for stage, number in held.items()}
    beside = parallel.torch_ddp and not parallel.gradient_as_bucket_view
    buckets = sum(held.values()) * master_bytes(compute) if beside else 0
    return round(_peak(parallel, batch, pipeline_rank, low, low)), round(max(low.values())) + buckets


def _compressed(shapes: Shapes, compute: Dtype, compression: Compression) -> int:
    """Rounded gradients, which all wait for a slow link; PowerSGD's errors, until the end of a step also the new
    ones."""
    if compression.kind is Compress.powersgd:
        cut = {name: shape for name, shape in shapes.items() if compression.factors(shape) is not None}
        return 2 * values(cut) * master_bytes(compute)
    return values(shapes) * ROUNDED_BYTES if compression.kind is not Compress.none else 0


def _at_once(model: ModelConfig, activations: ActivationsConfig) -> int:
    """Blocks that backward computes again together, or at least the one that it is in."""
    if settled(activations, model) is not Recompute.segments:
        return 1
    return max(end - first for first, end in pairwise(segment_borders(activations, model.layers)))


def _sharded(
    shapes: dict[int, Shapes], parallel: ParallelConfig, compute: Dtype, reduce: Dtype, batch: Batch, at_once: int
) -> tuple[int, int]:
    """FSDP2 has the root's parameters whole in the whole pass, and a block's while it runs (those of a segment while it
    is computed again), with those gathered ahead and a buffer of one block that is gathered or scattered. Where
    parameters stay whole after backward, all are. Gradients that are not summed in each micro-batch add up whole."""
    shards = parallel.shards
    blocks, root = [], 0
    for of_stage in shapes.values():
        in_blocks, outside = units(of_stage)
        blocks += [padded_shard(block, shards) * shards for block in in_blocks]
        root += padded_shard(outside, shards) * shards
    block, everything = max(blocks), root + sum(blocks)
    ahead = max(parallel.prefetch_forward, parallel.prefetch_backward, 1)
    again = reshards_to(parallel)
    stay = not parallel.reshard_after_backward and (batch.accumulation > 1 or parallel.pp > 1)
    if again is None or shards == 1 or stay:
        gathered = everything
    else:
        waiting = block // again if again < shards else 0  # between forward and backward, beside the masters
        gathered = root + min(at_once + ahead, len(blocks)) * block + len(blocks) * waiting
    if reductions(parallel, batch) < batch.accumulation or parallel.pp > 1:
        reduction = everything * BYTES[reduce] + block * BYTES[compute]
    else:
        reduction = (root + block) * BYTES[compute] + block * BYTES[reduce]
    return (gathered + block) * BYTES[compute], reduction
