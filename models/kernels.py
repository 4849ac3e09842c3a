"""The kernels of attention behind AttentionCore, all called alike: `kernel(q, k, v, documents, scores)`.

q: [batch, heads, queries, head_dim]; k, v: [batch, heads or a divisor of them, keys, head_dim]. The queries are of the
last tokens of the keys, and see the tokens up to their own. documents: of the keys, [batch, keys] or None. The result
has the shape of q. What each can do is in models.backends. But for those of scaled_dot_product_attention, on a CPU,
none has been run on a device yet."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import Attention
from models.softcap import softcapped


class Scores(NamedTuple):
    """What becomes of q k^T before it weighs values. scale: 1 / sqrt(head_dim) where None; softcap: see
    softcapped_attention; window: tokens that a token sees, itself among them; dropout: share of weights dropped."""

    scale: float | None
    softcap: float | None
    window: int | None
    dropout: float


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scores], Tensor]

END_TO_END = (Attention.flash2, Attention.flash3, Attention.flash4, Attention.varlen)


def switch_to(name: Attention) -> None:
    """Makes the process ready for a kernel. FlashAttention 3 and 4 take the place of torch's own in all of it, until
    another kernel is asked for."""
    from torch.nn import attention

    if name in END_TO_END:
        torch.compiler.config.capture_dynamic_output_shape_ops = True  # graphs may count documents
    implementation = {Attention.flash3: "FA3", Attention.flash4: "FA4"}.get(name)
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


# ---- torch's scaled_dot_product_attention


def sdpa(name: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    mask: Any = None
    queries, keys = q.shape[2], k.shape[2]
    windowed = scores.window is not None and scores.window < keys
    if documents is not None or windowed or scores.softcap is not None:
        mask = _seen(queries, keys, documents, scores.window, q.device)
    elif queries < keys and q.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(queries, keys)  # has kernels of its own. Not yet run on a GPU
    elif queries < keys:
        mask = _seen(queries, keys, None, None, q.device)
    if scores.softcap is not None:
        return softcapped_attention(q, k, v, mask, scores.scale, scores.softcap, scores.dropout)
    if name is Attention.efficient:
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    grouped = q.shape[1] != k.shape[1]
    with _only(name):
        return F.scaled_dot_product_attention(
            q, k, v, mask, scores.dropout, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
        )


def _only(name: Attention) -> AbstractContextManager[None]:
    """The kernel of this name and no other."""
    if name in (Attention.auto, Attention.sdpa):
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        Attention.flash: SDPBackend.FLASH_ATTENTION,
        Attention.efficient: SDPBackend.EFFICIENT_ATTENTION,
        Attention.cudnn: SDPBackend.CUDNN_ATTENTION,
        Attention.math: SDPBackend.MATH,
    }
    return sdpa_kernel(backends[name])


def _seen(queries: int, keys: int, documents: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    places = torch.arange(keys, device=device)
    of_queries = None if documents is None else documents[:, keys - queries :]
    return visible(places[keys - queries :], places, window, of_queries, documents)


def _repeated(heads: Tensor, number: int) -> Tensor:
    return heads.repeat_interleave(number // heads.shape[1], dim=1)


def visible(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    of_queries: Tensor | None = None,
    of_keys: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees: bool [queries, keys], with documents [batch, 1, queries, keys]. queries, keys: places
    in the sequence, [number]; of_queries, of_keys: their documents, [batch, number]."""
    back = queries[:, None] - keys
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    if of_queries is None or of_keys is None:
        return seen
    return seen & (of_queries[:, None, :, None] == of_keys[:, None, None, :])


def widened(v: Tensor, width: int) -> Tensor:
    return v if v.shape[-1] == width else F.pad(v, (0, width - v.shape[-1]))


def softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, cap: float, dropout: float
) -> Tensor:
    """Attention whose scores are bent into +- cap by tanh before the mask (Gemma Team 2024, Gemma 2), which no kernel
    of scaled_dot_product_attention does. The square of scores is there whole."""
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    shares = softcapped(wide, cap).masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    return F.dropout(shares, dropout) @ v


# ---- kernels that take documents one after the other


class Borders(NamedTuple):
    """Where each document begins among all queries and all keys of a batch laid end to end, and the ends: int32
    [documents + 1]."""

    queries: Tensor
    keys: Tensor


def borders(batch: int, queries: int, keys: int, documents: Tensor | None, device: torch.device) -> Borders:
    """A document of which no query is left is there without any. Where there are documents, this waits for the device
    to count them."""
    if documents is None:
        starts = torch.arange(batch, device=device) * keys
    else:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = begins.flatten().nonzero().squeeze(1)
    of_keys = F.pad(starts, (0, 1), value=batch * keys).int()
    if queries == keys:
        return Borders(of_keys, of_keys)
    of_queries = starts // keys * queries + (starts % keys - (keys - queries)).clamp(min=0)
    return Borders(F.pad(of_queries, (0, 1), value=batch * queries).int(), of_keys)


def _end_to_end(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, tokens, head_dim] to [batch x tokens, heads, head_dim]."""
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    return q, k, v


def _back(window: int | None) -> int:
    """Tokens before its own that a token sees; -1: all."""
    return -1 if window is None else window - 1


def flash2(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    """FlashAttention 2 of the package flash-attn (Dao 2023)."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = {
        "dropout_p": scores.dropout,
        "softmax_scale": scores.scale,
        "causal": True,
        "window_size": (_back(scores.window), 0),
        "softcap": scores.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if documents is None:
        attended: Tensor = flash_attn_func(*(part.transpose(1, 2) for part in (q, k, v)), **options)
        return attended.transpose(1, 2)
    of = borders(q.shape[0], q.shape[2], k.shape[2], documents, q.device)
    lengths = of.queries, of.keys, q.shape[2], k.shape[2]
    attended = flash_attn_varlen_func(*_end_to_end(q, k, v), *lengths, **options)
    return attended.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    """torch.nn.attention.varlen, on the FlashAttention that torch has been switched to (see switch_to)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    of = borders(q.shape[0], q.shape[2], k.shape[2], documents, q.device)
    options: dict[str, Any] = {"scale": scores.scale, "window_size": (_back(scores.window), 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in signature(varlen_attn).parameters:  # not on torch 2.11
            options["enable_gqa"] = True
        else:
            k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended = varlen_attn(*_end_to_end(q, k, v), of.queries, of.keys, q.shape[2], k.shape[2], **options)
    assert isinstance(attended, Tensor)
    return attended.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


# ---- kernels of other packages


def memory_efficient(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    """Of the package xformers (Lefaudeux et al. 2022). Its documents would have to be known on the host."""
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    assert documents is None and scores.softcap is None
    mask = LowerTriangularFromBottomRightMask()
    if scores.window is not None:
        mask = mask.make_local_attention(scores.window)
    parts = (part.transpose(1, 2) for part in (q, _repeated(k, q.shape[1]), _repeated(v, q.shape[1])))
    attended: Tensor = memory_efficient_attention(*parts, attn_bias=mask, p=scores.dropout, scale=scores.scale)
    return attended.transpose(1, 2)


# ---- kernels that are compiled from what they shall do


def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    """torch.nn.attention.flex_attention (Dong et al. 2024). On a CPU it has no gradients."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, keys, window, cap = q.shape[2], k.shape[2], scores.window, scores.softcap

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + (keys - queries)
        found = place >= key
        if window is not None:
            found = found & (place - key < window)
        if documents is not None:
            found = found & (documents[batch, place] == documents[batch, key])
        return found

    def bent(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcapped(score, cap)

    mask = create_block_mask(seen, None if documents is None else q.shape[0], None, queries, keys, q.device)
    eager = q.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _compiled(flex_attention) if eager else flex_attention
    grouped = q.shape[1] != k.shape[1]
    attended: Tensor = attend(q, k, v, None if cap is None else bent, mask, scores.scale, grouped)
    return attended


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As it is, flex_attention writes down all scores."""
    return torch.compile(function)


OF_SDPA = (Attention.auto, Attention.sdpa, Attention.flash, Attention.efficient, Attention.cudnn, Attention.math)
KERNELS: dict[Attention, Kernel] = {name: partial(sdpa, name) for name in OF_SDPA} | {
    Attention.flash2: flash2,
    Attention.flash3: varlen,
    Attention.flash4: varlen,
    Attention.flex: flex,
    Attention.varlen: varlen,
    Attention.xformers: memory_efficient,
}
