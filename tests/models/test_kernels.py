"""The kernels that can be tried without a GPU, against the formula of one token at a time; and of the others what they
are called with."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from models.backends import BACKENDS, Asked, absent, choose, lacks
from models.config import Attention
from models.kernels import KERNELS, Scores, borders
from tests.models.build import largest_difference

pytestmark = pytest.mark.torch211

KEYS = 11
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 3, [4] * 9 + [5] + [6]])
CASES = {
    "causal": (None, Scores(None, None, None, 0.0)),
    "scale": (None, Scores(0.4, None, None, 0.0)),
    "window": (None, Scores(None, None, 4, 0.0)),
    "documents": (DOCUMENTS, Scores(None, None, None, 0.0)),
    "documents, window, soft-cap": (DOCUMENTS, Scores(0.4, 0.7, 4, 0.0)),
}


def heads_of(queries: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads of queries, two of keys and values."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, heads, tokens, 8) for heads, tokens in ((4, queries), (2, KEYS), (2, KEYS))]
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return q, k, v


def by_formula(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: Scores) -> Tensor:
    """Each query by itself: the last of them is of the last token."""
    found = torch.empty_like(q)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scale = 1 / math.sqrt(q.shape[3]) if scores.scale is None else scores.scale
    for batch in range(q.shape[0]):
        for query in range(q.shape[2]):
            own = KEYS - q.shape[2] + query
            first = 0 if scores.window is None else max(0, own - scores.window + 1)
            seen = [
                key
                for key in range(first, own + 1)
                if documents is None or documents[batch, key] == documents[batch, own]
            ]
            products = torch.einsum("hd,hkd->hk", q[batch, :, query], k[batch, :, seen]) * scale
            if scores.softcap is not None:
                products = scores.softcap * (products / scores.softcap).tanh()
            found[batch, :, query] = torch.einsum("hk,hkd->hd", products.softmax(-1), v[batch, :, seen])
    return found


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("queries", [KEYS, 4])
@pytest.mark.parametrize("kernel", [Attention.sdpa, Attention.flash, Attention.math, Attention.flex])
def test_kernel_is_the_formula(kernel: Attention, queries: int, case: str) -> None:
    documents, scores = CASES[case]
    dtype = torch.float64 if "cpu" in BACKENDS[kernel].fp64 else torch.float32
    parts = heads_of(queries, dtype)
    with torch.no_grad():
        found = KERNELS[kernel](*parts, documents, scores)
    expected = by_formula(*heads_of(queries), documents, scores)
    assert largest_difference(found.double(), expected) < (1e-12 if dtype is torch.float64 else 1e-5)


def laid_out(q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor, scores: Scores) -> Tensor:
    """What a kernel of documents laid end to end gives, [tokens, heads, head_dim], by the formula in each document."""
    found = torch.empty_like(q)
    pairs = zip(of_queries.tolist(), of_queries.tolist()[1:], of_keys.tolist(), of_keys.tolist()[1:], strict=False)
    for begin, end, first, last in pairs:
        for query in range(begin, end):
            own = last - end + query
            seen = slice(first if scores.window is None else max(first, own - scores.window + 1), own + 1)
            keys, values = (part[seen].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            products = torch.einsum("hd,khd->hk", q[query], keys) * (scores.scale or 1 / math.sqrt(q.shape[-1]))
            if scores.softcap is not None:
                products = scores.softcap * (products / scores.softcap).tanh()
            found[query] = torch.einsum("hk,khd->hd", products.softmax(-1), values)
    return found


def end_to_end(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """With the arguments of flash_attn_varlen_func and of varlen_attn."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
    back, ahead = options["window_size"]
    assert ahead == 0 and options.get("causal", True)
    scale, cap = options.get("scale", options.get("softmax_scale")), options.get("softcap") or None
    return laid_out(q, k, v, cu_q, cu_k, Scores(scale, cap, None if back < 0 else back + 1, 0.0))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("queries", [KEYS, 4])
def test_flash_attn_is_called_for_what_is_meant(monkeypatch: pytest.MonkeyPatch, queries: int, case: str) -> None:
    """The package's functions are replaced by the formula on what they are given."""

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * part.shape[1] for part in (q, k))
        laid = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        return end_to_end(*laid, cu_q, cu_k, q.shape[1], k.shape[1], **options).view_as(q)

    package: Any = ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = dense, end_to_end
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    documents, scores = CASES[case]
    parts = heads_of(queries)
    found = KERNELS[Attention.flash2](*parts, documents, scores)
    assert largest_difference(found, by_formula(*parts, documents, scores)) < 1e-12


@pytest.mark.parametrize("case", [case for case in CASES if "soft-cap" not in case])
@pytest.mark.parametrize("queries", [KEYS, 4])
@pytest.mark.parametrize("groups", [False, True])
def test_varlen_is_called_for_what_is_meant(
    monkeypatch: pytest.MonkeyPatch, groups: bool, queries: int, case: str
) -> None:
    """Of a torch whose varlen_attn knows fewer heads of keys, and of one that does not."""

    def old(*parts: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        assert parts[0].shape[1] == parts[1].shape[1]
        return end_to_end(*parts, scale=scale, window_size=window_size)

    def new(*parts: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        assert enable_gqa and parts[0].shape[1] == 2 * parts[1].shape[1]
        return end_to_end(*parts, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if groups else old)
    documents, scores = CASES[case]
    parts = heads_of(queries)
    found = KERNELS[Attention.varlen](*parts, documents, scores)
    assert largest_difference(found, by_formula(*parts, documents, scores)) < 1e-12


@pytest.mark.parametrize("case", ["causal", "scale", "window"])
@pytest.mark.parametrize("queries", [KEYS, 4])
def test_xformers_is_called_for_what_is_meant(monkeypatch: pytest.MonkeyPatch, queries: int, case: str) -> None:
    """Its mask: aligned at the end, of so many keys with the query's own."""

    class Mask:
        window: int | None = None

        def make_local_attention(self, window: int) -> "Mask":
            local = Mask()
            local.window = window
            return local

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: Mask, p: float, scale: float | None) -> Tensor:
        assert p == 0.0 and q.shape[2] == k.shape[2]
        q, k, v = q.transpose(1, 2), k[:, :, ::2].transpose(1, 2), v[:, :, ::2].transpose(1, 2)
        return by_formula(q, k, v, None, Scores(scale, None, attn_bias.window, p)).transpose(1, 2)

    modules: dict[str, Any] = {name: ModuleType(name) for name in ("xformers", "xformers.ops", "xformers.ops.fmha")}
    modules["xformers.ops"].memory_efficient_attention = attention
    bias: Any = ModuleType("xformers.ops.fmha.attn_bias")
    bias.LowerTriangularFromBottomRightMask = Mask
    for name, module in (modules | {"xformers.ops.fmha.attn_bias": bias}).items():
        monkeypatch.setitem(sys.modules, name, module)
    documents, scores = CASES[case]
    q, k, v = heads_of(queries)
    found = KERNELS[Attention.xformers](q, k, v, documents, scores)
    assert largest_difference(found, by_formula(q, k, v, documents, scores)) < 1e-12


def test_borders_of_documents() -> None:
    whole = borders(2, KEYS, KEYS, DOCUMENTS, torch.device("cpu"))
    assert whole.keys.tolist() == [0, 3, 8, 11, 20, 21, 22] and whole.queries is whole.keys
    last = borders(2, 4, KEYS, DOCUMENTS, torch.device("cpu"))
    assert last.keys.tolist() == whole.keys.tolist()
    assert last.queries.tolist() == [0, 0, 1, 4, 6, 7, 8]  # places 7 to 10 of each


# ---- what is chosen, what is refused

PLAIN = Asked(documents=False, window=False, softcap=False, dropout=False, dtype="bf16")


def asked(**more: Any) -> Asked:
    return Asked(**(vars(PLAIN) | more))


def test_every_kernel_has_a_row() -> None:
    assert set(BACKENDS) == set(Attention) - {Attention.auto} and set(KERNELS) == set(Attention)


@pytest.mark.parametrize(
    ("device", "capability", "wanted", "installed", "expected"),
    [
        ("cpu", (0, 0), PLAIN, {"flash2", "flash3"}, "sdpa"),
        ("cuda", (9, 0), PLAIN, {"flash2", "flash3"}, "flash3"),
        ("cuda", (9, 0), PLAIN, {"flash2"}, "flash2"),
        ("cuda", (9, 0), PLAIN, set(), "sdpa"),
        ("cuda", (9, 0), asked(softcap=True), {"flash2", "flash3"}, "flash2"),
        ("cuda", (9, 0), asked(softcap=True, dropout=True), {"flash2", "flash3"}, "sdpa"),
        ("cuda", (9, 0), asked(documents=True, window=True), {"flash2", "flash3"}, "flash3"),
        ("cuda", (9, 0), asked(dtype="fp32"), {"flash2", "flash3"}, "sdpa"),
        ("cuda", (9, 0), asked(width=257), {"flash2", "flash3"}, "sdpa"),
        ("cuda", (9, 0), asked(width=256), {"flash2", "flash3"}, "flash3"),
        ("cuda", (8, 6), PLAIN, {"flash2", "flash3"}, "flash2"),
        ("cuda", (10, 0), PLAIN, {"flash2", "flash3"}, "flash2"),
        ("cuda", (7, 5), PLAIN, {"flash2", "flash3"}, "sdpa"),
    ],
)
def test_auto(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    wanted: Asked,
    installed: set[str],
    expected: str,
) -> None:
    monkeypatch.setattr("models.backends.absent", lambda kernel: None if kernel.name in installed else "it")
    kernel, why = choose(wanted, device, capability)
    assert kernel.name == expected and why
    assert lacks(kernel, wanted, device) is None


def test_what_is_not_installed_is_named() -> None:
    if absent(Attention.flash2) is not None:
        assert "flash-attn" in str(absent(Attention.flash2))
    assert absent(Attention.sdpa) is None
