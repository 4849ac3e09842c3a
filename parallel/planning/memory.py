"""What a rank holds in memory during a training step, from a config alone. No torch here.

The bytes of parameters, gradients and moments are exact. What is gathered, what waits to be reduced and what is kept
for backward are estimates of the peak, without the allocator's fragmentation, CUDA's context and the kernels' own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from models.config import ModelConfig
from models.shapes import Shapes, has_gradient, in_router, is_learned
from parallel.config import (
    UNCOMPRESSED,
    ActivationsConfig,
    Compress,
    Compression,
    Dtype,
    ParallelConfig,
    Recompute,
    Strategy,
    experts_apart,
)
from parallel.planning.activations import How, peak_bytes, running_bytes, waiting_bytes
from parallel.planning.layout import (
    BYTES,
    as_sharded,
    experts_here,
    master_bytes,
    padded_shard,
    reshards_to,
    shard_shapes,
    tensor_shapes,
    units,
    values,
    without_experts,
)
from parallel.planning.stages import Stage, as_scheduled, extrapolated, held_stages, order_of, stage_shapes, unsplit
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


def held_shapes(
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: Stage,
    shard_rank: int = 0,
    tensor_rank: int = 0,
    expert_rank: int = 0,
) -> Shapes:
    """What a rank holds of the parameters of a stage. Where sizes do not divide, the first rank of dp_shard, tp and
    expert_shard holds the most; those along ep hold as much."""
    shapes = stage_shapes(model, parallel, stage)
    experts: Shapes = {}
    if experts_apart(model, parallel):
        experts = shard_shapes(experts_here(shapes, parallel.ep), parallel.expert_shards, expert_rank)
        shapes = without_experts(shapes)
    return shard_shapes(tensor_shapes(shapes, model, parallel.tp, tensor_rank), parallel.shards, shard_rank) | experts


@dataclass(frozen=True)
class State:
    """Values of the parameters that a rank holds, of their gradients, and of those that the optimizer changes: what
    routers count is neither learned nor, in part, has it a gradient."""

    parameters: int
    gradients: int
    learned: int


def state_of(model: ModelConfig, held: Shapes) -> State:
    counted = {name: shape for name, shape in held.items() if has_gradient(name, model)}
    learned = {name: shape for name, shape in held.items() if is_learned(name)}
    return State(values(held), values(counted), values(learned))


def _held(model: ModelConfig, parallel: ParallelConfig, pipeline_rank: int) -> dict[int, Shapes]:
    """By stage of a rank what it has of each parameter before data parallelism cuts it further, experts that are apart
    not yet cut."""
    return {
        stage.index: tensor_shapes(stage_shapes(model, parallel, stage), model, parallel.tp)
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
    AdamW 2, SGD 1. Raises ValueError while the vocabulary is not known. With a pipeline this imports torch."""
    stages = held_stages(model, parallel, pipeline_rank)
    states = [state_of(model, held_shapes(model, parallel, stage)) for stage in stages]
    parameters, gradients, learned = (
        sum(of_stage) * master_bytes(compute)
        for of_stage in zip(*[(of.parameters, of.gradients, of.learned) for of in states], strict=True)
    )
    shapes = _held(model, parallel, pipeline_rank)
    kept = as_scheduled(activations, parallel)
    peak = partial(_peak, parallel, batch, pipeline_rank, unsplit(model, parallel))
    if parallel.strategy is Strategy.single or parallel.torch_ddp:
        copies, reduction = _whole(shapes, peak, parallel, compute)
        reduction += _compressed(shapes[0], compute, compression) if parallel.torch_ddp else 0
    else:
        experts: list[Shapes] = []
        if experts_apart(model, parallel):
            experts = [unit for held in shapes.values() for unit in units(experts_here(held, parallel.ep))[0]]
            shapes = {index: without_experts(of_stage) for index, of_stage in shapes.items()}
        at_once = _at_once(model, kept)
        copies, reduction = _sharded(shapes, experts, as_sharded(parallel), compute, reduce, batch, at_once)
    tokens = batch.micro_batch * batch.sequence_length
    how = How(kept, compute, parallel, batch.sequence_length * parallel.cp)
    waiting = {stage.index: tokens * waiting_bytes(model, stage, how) for stage in stages}
    running = {stage.index: tokens * running_bytes(model, stage, how) for stage in stages}
    return Memory(parameters, gradients, moments * learned, copies, reduction, round(peak(waiting, running)))


def _peak(
    parallel: ParallelConfig,
    batch: Batch,
    pipeline_rank: int,
    whole: int | None,
    waiting: dict[int, float],
    running: dict[int, float],
) -> float:
    """peak_bytes of a step. whole: the stage that is `unsplit`."""

    def peak(micro_batches: int) -> float:
        return peak_bytes(order_of(parallel, micro_batches, pipeline_rank, whole), waiting, running)

    return extrapolated(peak, parallel, batch.accumulation)


def _whole(
    shapes: dict[int, Shapes],
    peak: Callable[[dict[int, float], dict[int, float]], float],
    parallel: ParallelConfig,
    compute: Dtype,
) -> tuple[int, int]:
    """LowPrecision copies every parameter but routers for the whole pass of a micro-batch, and the gradients of the
    copies arrive at the masters at its end; DDP may have its buckets beside the gradients."""
    held = {stage: values(of_stage) for stage, of_stage in shapes.items()}
    width = BYTES[compute] if BYTES[compute] < master_bytes(compute) else 0
    low = {
        stage: float(width * values({name: shape for name, shape in of_stage.items() if not in_router(name)}))
        for stage, of_stage in shapes.items()
    }
    beside = parallel.torch_ddp and not parallel.gradient_as_bucket_view
    buckets = sum(held.values()) * master_bytes(compute) if beside else 0
    return round(peak(low, low)), round(max(low.values())) + buckets


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
    shapes: dict[int, Shapes],
    experts: list[Shapes],
    parallel: ParallelConfig,
    compute: Dtype,
    reduce: Dtype,
    batch: Batch,
    at_once: int,
) -> tuple[int, int]:
    """FSDP2 has the root's parameters whole in the whole pass, and a block's while it runs (those of a segment while it
    is computed again), with those gathered ahead and a buffer of one unit that is gathered or scattered. Where
    parameters stay whole after backward, all are. Gradients that are not summed in each micro-batch add up whole.

    experts: of each layer where they are apart from it, gathered while they run, none ahead."""
    shards = parallel.shards
    blocks, root = [], 0
    for of_stage in shapes.values():
        in_blocks, outside = units(of_stage)
        blocks += [padded_shard(block, shards) * shards for block in in_blocks]
        root += padded_shard(outside, shards) * shards
    layers = [padded_shard(unit, parallel.expert_shards) * parallel.expert_shards for unit in experts]
    block, layer = max(blocks), max(layers, default=0)
    everything, largest = root + sum(blocks) + sum(layers), max(block, layer)
    ahead = max(parallel.prefetch_forward, parallel.prefetch_backward, 1)
    again = reshards_to(parallel)
    stay = not parallel.reshard_after_backward and (batch.accumulation > 1 or parallel.pp > 1)
    if again is None or shards == 1 or stay:
        gathered = root + sum(blocks)
    else:
        waiting = block // again if again < shards else 0  # between forward and backward, beside the masters
        gathered = root + min(at_once + ahead, len(blocks)) * block + len(blocks) * waiting
    whole = parallel.reshard_after_forward is False or parallel.expert_shards == 1 or stay
    gathered += sum(layers) if whole else layer
    if reductions(parallel, batch) < batch.accumulation or parallel.pp > 1:
        reduction = everything * BYTES[reduce] + largest * BYTES[compute]
    else:
        reduction = (root + block + layer) * BYTES[compute] + largest * BYTES[reduce]
    return (gathered + largest) * BYTES[compute], reduction
