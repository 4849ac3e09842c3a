"""Attention over keys and values that go round a ring of ranks: Liu et al. 2023 (Ring Attention with Blockwise
Transformers), with the causal mask shared out evenly.

It is an operator of its own, forward and backward, so that a compiler takes it as it is."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.kernels import visible
from parallel.sequence import SequenceShare

_aten = torch.ops.aten
_SHARES: dict[str, SequenceShare] = {}  # by the name of their group: operators take no objects
Flat = tuple[Tensor, Tensor]


class Ring(nn.Module):
    """Causal attention of this rank's tokens to those of all ranks of the share, or those of a window."""

    def __init__(self, share: SequenceShare) -> None:
        super().__init__()
        self.name = share.group.group_name
        _SHARES[self.name] = share

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float | None, window: int | None
    ) -> Tensor:
        """q, k, v: [batch, heads, seq / ranks, head_dim], k and v perhaps of fewer heads; documents: [batch, seq] or
        None. Returns the shape of q."""
        attended: Tensor = ring_attention(q, k, v, documents, scale, window, self.name)[0]
        return attended


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float | None, window: int | None, name: str
) -> tuple[Tensor, Tensor]:
    """What Ring gives, and the log-sum-exp of each query's scores, [batch, heads, seq / ranks]."""
    share = _SHARES[name]
    passing = torch.stack([k, v])
    for step in range(share.size):
        hop = Hop(share, passing) if step + 1 < share.size else None
        queries, keys = attending(share, step, q.shape[2])
        k, v = (_repeated(part[:, :, keys], q.shape[1]) for part in passing.unbind())
        mask = _mask(share, step, queries, keys, q, documents, window)
        found, sums = _attend(q[:, :, queries], k, v, mask, step == 0 and mask is None, scale)
        if step == 0:
            attended, log_sums = found.to(sums.dtype), sums
        else:
            merge(attended[:, :, queries], log_sums[:, :, queries], found, sums)
        passing = hop.wait() if hop is not None else passing
    return attended.to(q.dtype).contiguous(), log_sums.contiguous()


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,
    log_sums: Tensor,
    documents: Tensor | None,
    scale: float | None,
    window: int | None,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Those of keys and values go round with them, one hop behind, and come home."""
    share = _SHARES[name]
    passing, q_gradient = torch.stack([k, v]), torch.zeros_like(q, dtype=log_sums.dtype)
    gradients = torch.zeros_like(passing, dtype=log_sums.dtype)
    for step in range(share.size):
        hop = Hop(share, passing) if step + 1 < share.size else None
        queries, keys = attending(share, step, q.shape[2])
        k, v = (_repeated(part[:, :, keys], q.shape[1]) for part in passing.unbind())
        mask = _mask(share, step, queries, keys, q, documents, window)
        given, asked, gave, sums = (part[:, :, queries] for part in (gradient, q, attended, log_sums))
        found = _attend_backward(given, asked, gave, sums, k, v, mask, step == 0 and mask is None, scale)
        q_gradient[:, :, queries] += found[0]
        for place, of_heads in enumerate(found[1:]):
            gradients[place, :, :, keys] += of_heads.unflatten(1, (gradients.shape[2], -1)).sum(2)
        gradients = Hop(share, gradients).wait()
        passing = hop.wait() if hop is not None else passing
    k_gradient, v_gradient = gradients.to(q.dtype).unbind()
    return q_gradient.to(q.dtype), k_gradient.clone(), v_gradient.clone()  # an operator's results share no memory


def attending(share: SequenceShare, step: int, length: int) -> tuple[slice, slice]:
    """Which of this rank's tokens attend to which of those that came `step` ranks round. Each rank has two pieces: of
    an earlier rank's only the first lies before any of its own, of a later rank's both lie before its second."""
    half, every = length // 2, slice(None)
    if step == 0:
        return every, every
    return (every, slice(half)) if step <= share.rank else (slice(half, None), every)


def merge(attended: Tensor, log_sums: Tensor, found: Tensor, sums: Tensor) -> None:
    """Adds in place what more keys give: softmax over two sets of keys from each one's result and log-sum-exp (Milakov
    and Gimelshein 2018, Online normalizer calculation for softmax)."""
    both = torch.logaddexp(log_sums, sums)
    attended.mul_((log_sums - both).exp().unsqueeze(-1)).add_(found * (sums - both).exp().unsqueeze(-1))
    log_sums.copy_(both)


class Hop:
    """A tensor on the way to the next rank, while the previous rank's comes."""

    def __init__(self, share: SequenceShare, tensor: Tensor) -> None:
        ranks = dist.get_process_group_ranks(share.group)
        after, before = ranks[(share.rank + 1) % share.size], ranks[share.rank - 1]
        self.sent, self.received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, after, group=share.group),
                dist.P2POp(dist.irecv, self.received, before, group=share.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _repeated(heads: Tensor, number: int) -> Tensor:
    return heads.repeat_interleave(number // heads.shape[1], dim=1)


def _mask(
    share: SequenceShare,
    step: int,
    queries: slice,
    keys: slice,
    q: Tensor,
    documents: Tensor | None,
    window: int | None,
) -> Tensor | None:
    """To be added to scores [batch or 1, 1, queries, keys]; None where causality is enough. Finite, since a query may
    see none of these keys."""
    length = q.shape[2] * share.size
    if documents is None and (window is None or window >= length):
        return None
    places = share.order(length, q.device).chunk(share.size)
    own, theirs = places[share.rank][queries], places[share.rank - step][keys]
    of_own = None if documents is None else documents[:, own]
    of_theirs = None if documents is None else documents[:, theirs]
    seen = visible(own, theirs, window, of_own, of_theirs)
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min / 2)
    return mask.expand(*[1] * (4 - mask.dim()), *mask.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Flat:
    """The kernel's result and its log-sum-exp."""
    if not q.is_cuda:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu
        found: Flat = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return found
    _refuse_mask(mask)  # Not yet run on a GPU, and neither is its backward pass
    attended, log_sums, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return attended, log_sums


def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    attended: Tensor,
    log_sums: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """attended, log_sums: of all keys, so that the gradients of these keys' part are exact."""
    if not q.is_cuda:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, q, k, v, attended, log_sums, 0.0, causal, attn_mask=mask, scale=scale)
    _refuse_mask(mask)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout of 0
    lengths = (None, None, q.shape[2], k.shape[2])
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(gradient, q, k, v, attended, log_sums, *lengths, 0.0, causal, seed, seed, scale=scale)


def _refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError(
            "the GPU kernel of parallel.context=ring takes no documents and no window: use parallel.context=gather"
        )


ring_attention = torch.library.custom_op("espalier::ring_attention", _forward, mutates_args=())
ring_attention_backward = torch.library.custom_op("espalier::ring_attention_backward", _backward, mutates_args=())
# What each operator does, for who wants to see it communicate.
INSIDE: dict[str, Callable[..., Any]] = {"ring_attention": _forward, "ring_attention_backward": _backward}


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape[:3], dtype=wide, device=q.device)


@ring_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    found = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (q, k, v)]
    return found[0], found[1], found[2]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
    q, k, v, documents, ctx.scale, ctx.window, ctx.name = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _take(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    q, k, v, attended, log_sums = saved
    fixed = documents, ctx.scale, ctx.window, ctx.name
    found = ring_attention_backward(gradient.contiguous(), q, k, v, attended, log_sums, *fixed)
    return *found, None, None, None, None


ring_attention.register_autograd(_take, setup_context=_keep)
