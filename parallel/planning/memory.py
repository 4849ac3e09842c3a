"""What a rank holds in memory during a training step, from a config alone. No torch here.

The bytes of parameters, gradients and moments are exact. What is gathered, what waits to be reduced and what is kept
for backward are estimates of the peak, without the allocator's fragmentation, CUDA's context and the kernels' own."""

from dataclasses import dataclass

from models.config import ModelConfig
from models.shapes import block_shapes, parameter_shapes, root_shapes
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Strategy
from parallel.planning.activations import activation_bytes
from parallel.planning.layout import (
    BYTES,
    as_sharded,
    master_bytes,
    padded_shard,
    reshards_to,
    shard_shapes,
    tensor_shapes,
    values,
)
from parallel.planning.traffic import Batch, reductions


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. With parallel.cpu_offload the first three wait in the CPU's memory."""

    parameters: int  # masters
    gradients: int  # of the masters
    optimizer: int  # the moments
    copies: int  # parameters in the compute dtype, and those gathered at once
    reduction: int  # gradients that are not yet summed
    activations: int

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.copies + self.reduction + self.activations


def held_values(model: ModelConfig, parallel: ParallelConfig, shard_rank: int = 0, tensor_rank: int = 0) -> int:
    """Values of the parameters that a rank holds. Where sizes do not divide, the first rank of an axis holds the
    most."""
    shapes = tensor_shapes(parameter_shapes(model), parallel.tp, tensor_rank)
    return values(shard_shapes(shapes, parallel.dp_shard, shard_rank))


def memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    compute: Dtype,
    reduce: Dtype,
    batch: Batch,
    activations: ActivationsConfig,
    moments: int,
) -> Memory:
    """The peak of the first rank. `moments`: the optimizer's values for each of the parameters'; AdamW 2, SGD 1. Raises
    ValueError while the vocabulary is not known."""
    masters = held_values(model, parallel) * master_bytes(compute)
    if parallel.strategy is Strategy.single or parallel.torch_ddp:
        copies, reduction = _whole(model, parallel, compute)
    else:
        copies, reduction = _sharded(model, as_sharded(parallel), compute, reduce, batch)
    kept = batch.micro_batch * batch.sequence_length * activation_bytes(model, activations, compute, parallel.tp)
    return Memory(masters, masters, moments * masters, copies, reduction, round(kept))


def _whole(model: ModelConfig, parallel: ParallelConfig, compute: Dtype) -> tuple[int, int]:
    """LowPrecision copies every parameter for the whole pass, and the gradients of the copies arrive at the masters at
    its end; DDP may have its buckets beside the gradients."""
    held = held_values(model, parallel)
    low = held * BYTES[compute] if BYTES[compute] < master_bytes(compute) else 0
    beside = parallel.torch_ddp and not parallel.gradient_as_bucket_view
    return low, low + (held * master_bytes(compute) if beside else 0)


def _sharded(
    model: ModelConfig, parallel: ParallelConfig, compute: Dtype, reduce: Dtype, batch: Batch
) -> tuple[int, int]:
    """FSDP2 has the root's parameters whole in the whole pass, and a block's while it runs, with those gathered ahead
    and a buffer of one block that is gathered or scattered. Gradients that are not summed in each micro-batch add up
    whole."""
    shards, layers = parallel.dp_shard, model.layers
    block = max(
        padded_shard(tensor_shapes(block_shapes(model, layer), parallel.tp), shards) * shards for layer in range(layers)
    )
    root = padded_shard(tensor_shapes(root_shapes(model), parallel.tp), shards) * shards
    ahead = max(parallel.prefetch_forward, parallel.prefetch_backward, 1)
    again = reshards_to(parallel)
    if again is None or shards == 1:
        gathered = root + layers * block
    else:
        waiting = block // again if again < shards else 0  # between forward and backward, beside the masters
        gathered = root + min(1 + ahead, layers) * block + layers * waiting
    if reductions(parallel, batch) < batch.accumulation:
        reduction = (root + layers * block) * BYTES[reduce] + block * BYTES[compute]
    else:
        reduction = (root + block) * BYTES[compute] + block * BYTES[reduce]
    return (gathered + block) * BYTES[compute], reduction
