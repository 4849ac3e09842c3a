"""Which blocks are computed again in backward, and what that costs. No torch here."""

import math

from models.config import Attention, ModelConfig, NormPlace
from models.flops import block_flops_per_token, flops_per_token, parameters
from parallel.config import ActivationsConfig, ParallelConfig, Recompute, experts_apart

# Kernels that are no single operation which backward could be given the result of.
NOT_KEPT = (Attention.math, Attention.flash2, Attention.flex, Attention.xformers)
SELECTIVE_FROM = 1_000_000_000  # parameters


def settled(config: ActivationsConfig, model: ModelConfig) -> Recompute:
    """The mode that `auto` stands for."""
    if config.mode is not Recompute.auto:
        return config.mode
    return Recompute.none if parameters(model) < SELECTIVE_FROM else Recompute.selective


def recomputed_layers(config: ActivationsConfig, model: ModelConfig) -> range:
    """The blocks that are computed again one by one."""
    mode = settled(config, model)
    if mode in (Recompute.full, Recompute.selective):
        return model.all_blocks
    return model.all_blocks[:: config.every_n] if mode is Recompute.every_n else range(0)


def keeps_nothing(config: ActivationsConfig, model: ModelConfig, parallel: ParallelConfig, layer: int) -> bool:
    """Whether a block that is computed again keeps nothing but its input, not even what attention gave and what was
    scattered: where FSDP2 gathers experts within it, unless it is computed again in pieces
    (parallel.activations.keep_activations)."""
    apart = experts_apart(model, parallel) and model.routed(layer)
    return apart and settled(config, model) is not Recompute.selective


def segment_borders(config: ActivationsConfig, layers: int) -> list[int]:
    """First block of each segment, and the number of blocks. Sizes differ by one at most."""
    count = min(config.segments or round(math.sqrt(layers)), layers)
    return [layers * place // count for place in range(count + 1)]


def recomputed_flops_per_token(config: ActivationsConfig, model: ModelConfig, sequence_length: int) -> float | None:
    """Operations of matrix products and attention that backward does again for one token, counted as in
    `flops_per_token`; None where torch chooses (budget).

    full, every_n: 2 per weight of the block, without its last matrix product, whose result no gradient needs (with
    dropout it lies on the way to the mask, and a norm after it needs it); attention is kept, unless it is no single
    operation: its kernel is one of NOT_KEPT, or its scores are bent. segments: 2 per weight and 4 x dim x
    sequence_length for attention, without the last product of each. selective and offload: none.
    """
    mode = settled(config, model)
    if mode is Recompute.budget:
        return None
    if mode is Recompute.selective:
        return 0.0
    segments = mode is Recompute.segments
    layers = range(model.layers) if segments else recomputed_layers(config, model)
    ends = [end - 1 for end in segment_borders(config, model.layers)] if segments else layers
    unneeded = model.dropout == 0 and model.norm_place is NormPlace.before
    attention_kept = model.attention not in NOT_KEPT and model.attention_softcap is None
    again = 0.0
    for layer in layers:
        products, attention, last = block_flops_per_token(model, sequence_length, layer)
        again += products - (last if layer in ends and unneeded else 0.0)
        again += attention if segments or not attention_kept else 0.0
    return again


def told(config: ActivationsConfig, model: ModelConfig, sequence_length: int) -> str:
    """What is kept and what it costs, in a few words."""
    mode = settled(config, model)
    again = recomputed_flops_per_token(config, model, sequence_length)
    if mode is Recompute.none:
        return mode.name
    if again is None:
        return f"{mode.name} {config.budget}, more operations as torch chooses"
    share = again / flops_per_token(model, sequence_length)
    return f"{mode.name}, {share:.0%} more operations".replace("%", " %")
