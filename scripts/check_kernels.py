"""Each kernel of attention that a device has, against the formula in float64: results and gradients, with and without
what a config can ask for, as it is and compiled; and that no document changes a bit of another. Not yet run on a
GPU."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from models.attention import AttentionCore
from models.backends import BACKENDS, Asked, absent, choose, lacks
from models.config import Attention

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest value
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Case(NamedTuple):
    """window: a share of the keys. queries: the last ones of the keys, as a share."""

    documents: bool = False
    window: float | None = None
    softcap: float | None = None
    groups: int = 1
    queries: float = 1.0


CASES = {
    "causal": Case(),
    "grouped heads": Case(groups=4),
    "window": Case(window=0.25),
    "documents": Case(documents=True),
    "soft-cap": Case(softcap=0.5),
    "last queries": Case(queries=0.25),
    "documents, window, grouped": Case(documents=True, window=0.25, groups=4),
    "documents, soft-cap, window": Case(documents=True, window=0.25, softcap=0.5),
    "documents, last queries": Case(documents=True, queries=0.25),
}


class Sizes(NamedTuple):
    batch: int = 2
    heads: int = 8
    tokens: int = 1024
    head_dim: int = 64


def check(sizes: Sizes, device: torch.device, deadline: float) -> tuple[list[list[str]], bool, list[str]]:
    """Rows of the table, whether all are right, and what there was no time for."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    plain = Asked(documents=False, window=False, softcap=False, dropout=False, dtype="bf16")
    kernel, why = choose(plain, device.type, capability)
    print(f"attention=auto: {kernel.name} ({why})", flush=True)
    rows, good, left_out = [], True, []
    for name, backend in BACKENDS.items():
        missing = absent(name) or (f"not on {device.type}" if device.type not in backend.runs else None)
        if missing or (backend.majors and capability[0] not in backend.majors):
            print(f"  {name.name}: left out, {missing or 'not on this GPU'}", flush=True)
            continue
        for dtype in BOUNDS:
            for compiled in (False, True) if device.type == "cuda" else (False,):
                what = f"{name.name} {NAMES[dtype]}{' compiled' if compiled else ''}"
                if perf_counter() > deadline:
                    left_out.append(what)
                    continue
                print(f"  {what}", flush=True)
                found = rows_of(name, dtype, compiled, sizes, device)
                good &= all(row[-1] == "ok" for row in found)
                rows += [[what, *row] for row in found]
    return rows, good, left_out


def rows_of(name: Attention, dtype: torch.dtype, compiled: bool, sizes: Sizes, device: torch.device) -> list[list[str]]:
    rows = []
    for title, case in CASES.items():
        asked = Asked(case.documents, case.window is not None, case.softcap is not None, False, NAMES[dtype])
        if lacks(name, asked, device.type):
            continue
        try:
            rows.append([title, *compare(name, case, dtype, compiled, sizes, device)])
        except Exception as error:  # of this kernel; the others are still to be seen
            rows.append([title, "", "", "", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"])
    return rows


def compare(
    name: Attention, case: Case, dtype: torch.dtype, compiled: bool, sizes: Sizes, device: torch.device
) -> list[str]:
    """The largest difference of the result and of the gradients, and whether documents stay apart."""
    torch.compiler.reset()
    window = None if case.window is None else int(case.window * sizes.tokens)
    documents = documents_of(sizes, device) if case.documents else None
    core = AttentionCore(name, 0.0, None, case.softcap, window)
    attend = torch.compile(core.attend, fullgraph=True) if compiled else core.attend
    parts = heads_of(case, sizes, device, dtype)
    found = with_gradients(attend, parts, documents)
    plain = AttentionCore(Attention.sdpa if case.softcap else Attention.math, 0.0, None, case.softcap, window)
    expected = with_gradients(plain.attend, [part.double() for part in parts], documents)
    apart = [
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    ]
    held = all(difference <= BOUNDS[dtype] for difference in apart)  # false for NaN too
    kept = "" if documents is None else "apart" if stays_apart(attend, parts, documents) else "MIXED"
    verdict = "ok" if held and kept != "MIXED" else "DIFFERS"
    return [f"{apart[0]:.1e}", f"{max(apart[1:]):.1e}", kept, verdict]


def heads_of(case: Case, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(0)
    queries, groups = int(case.queries * sizes.tokens), sizes.heads // case.groups
    shapes = [(sizes.heads, queries), (groups, sizes.tokens), (groups, sizes.tokens)]
    drawn = [torch.randn(sizes.batch, *shape, sizes.head_dim, generator=generator) for shape in shapes]
    return [part.to(device, dtype) for part in drawn]


def documents_of(sizes: Sizes, device: torch.device) -> Tensor:
    """Three in the first sequence, others elsewhere in the next."""
    places = torch.arange(sizes.tokens, device=device)
    borders = [[sizes.tokens * part // (7 + row) for part in (3, 5)] for row in range(sizes.batch)]
    return torch.stack([sum((places >= border).long() for border in of_row) for of_row in borders])  # type: ignore[misc]


def with_gradients(attend: Callable[..., Tensor], parts: list[Tensor], documents: Tensor | None) -> tuple[Tensor, ...]:
    leaves = [part.detach().requires_grad_() for part in parts]
    result = attend(*leaves, documents)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(result.shape, generator=generator).to(result)
    return result.detach(), *torch.autograd.grad(result, leaves, gradient)


def stays_apart(attend: Callable[..., Tensor], parts: list[Tensor], documents: Tensor) -> bool:
    """Whether the last document of each sequence has the same bits after the keys and values of others changed."""
    q, k, v = parts
    last = documents == documents[:, -1:]
    others = ~last[:, None, :, None]
    with torch.no_grad():
        before = attend(q, k, v, documents)
        after = attend(q, torch.where(others, k + 1, k), torch.where(others, -v, v), documents)
    own = last[:, -q.shape[2] :, None]
    same = before.transpose(1, 2).eq(after.transpose(1, 2)) | ~own[..., None]
    return bool(same.all())
