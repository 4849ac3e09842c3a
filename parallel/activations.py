"""What forward keeps for backward: all, a part with the rest computed again, or all of it in CPU memory.

No parameter changes its name: the forward of a block is replaced, or the decoder's Walk."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.config import Attention
from models.decoder import Block, Decoder, Stream, Values, Walk
from models.moe import MoE
from parallel import ring  # noqa: F401 (has the operator)
from parallel.config import ActivationsConfig, Recompute
from parallel.offload import OffloadedWalk
from parallel.pieces import replace_pieces
from parallel.precision import on_same_copies
from parallel.recomputation import recomputed_layers, segment_borders, settled

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
ATTENTION = [  # the fused kernels: output and log-sum-exp
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.espalier.ring_attention.default,
]
REDUCE_SCATTERS = [_collectives.reduce_scatter_tensor.default]  # tensor parallelism's: not communicated again
PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default]
PRODUCTS += [_aten._grouped_mm.default, torch.ops.espalier.looped_product.default]  # of experts


def keep_activations(model: Decoder, config: ActivationsConfig, device: torch.device, apart: bool) -> None:
    """Applies the mode in place, before anything is compiled. apart: FSDP2 gathers experts within a block."""
    mode = settled(config, model.config)
    options: dict[str, Any] = {"preserve_rng_state": model.config.dropout > 0}
    products = PRODUCTS if mode is Recompute.selective else []
    kept = attention_of(model.config.attention) + REDUCE_SCATTERS + products
    keeping = {"context_fn": partial(create_selective_checkpoint_contexts, kept), **options}
    layers = recomputed_layers(config, model.config)
    for block in [block for layer, block in model.blocks_by_layer.items() if layer in layers]:
        if not (apart and block.routed):
            block.forward = recomputed([block], block.forward, **keeping)  # type: ignore[method-assign]
        elif mode is Recompute.selective:
            recompute_pieces(block, keeping, options)
        else:  # torch can keep nothing of what is computed again where FSDP2 gathers
            block.forward = recomputed([block], block.forward, **options)  # type: ignore[method-assign]
    if mode is Recompute.segments:
        model.walk = SegmentedWalk(config, options)
    if mode is Recompute.offload:
        model.walk = OffloadedWalk(device)
    set_budget(config.budget if mode is Recompute.budget else 1.0)


def attention_of(kernel: Attention) -> list[Any]:
    """Operators of attention whose results are kept."""
    if kernel not in (Attention.flash3, Attention.flash4, Attention.varlen):
        return ATTENTION
    import torch.nn.attention.varlen  # imports the compiler, and has the operator

    return [*ATTENTION, torch.ops.torch_attn._varlen_attn.default]


def recomputed(blocks: Sequence[nn.Module], call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`call`, which runs the blocks, so that backward runs it again on the same parameters and random numbers, but for
    what `context_fn` keeps. options: those of torch.utils.checkpoint."""

    def run(*stream: Tensor, **inputs: Any) -> Any:
        again = call if torch.compiler.is_compiling() else on_same_copies(blocks, call)
        return checkpoint(again, *stream, use_reentrant=False, **options, **inputs)

    return run


def recompute_pieces(block: Block, keeping: dict[str, Any], options: dict[str, Any]) -> None:
    """What is between matrix products and exchanges, of a block whose experts are apart. Rows are sent once."""
    replace_pieces(block, lambda module, method: recomputed([module], method, **keeping))
    assert isinstance(block.feedforward, MoE)
    experts = block.feedforward.experts
    experts.contract = recomputed([experts], experts.contract, **options)  # type: ignore[method-assign]


class SegmentedWalk(Walk):
    """Keeps the stream between segments of blocks only (Chen et al. 2016, Training Deep Nets with Sublinear Memory
    Cost)."""

    def __init__(self, config: ActivationsConfig, options: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.options = options

    def forward(self, blocks: Sequence[Block], stream: Stream, values: Values, **inputs: Tensor | None) -> Stream:
        for first, end in pairwise(segment_borders(self.config, len(blocks))):
            segment = blocks[first:end]

            def call(*stream: Tensor, segment: Sequence[Block] = segment, **inputs: Any) -> Stream:
                return Walk.forward(self, segment, stream, **inputs)

            stream = recomputed(segment, call, **self.options)(*stream, values=values[first:end], **inputs)
        return stream


def set_budget(share: float) -> None:
    """Of what a compiled graph would keep for backward, how much it may keep; for all graphs compiled from now on."""
    # private, with no public counterpart; seen on torch 2.11 and 2.15
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = share
