"""Attention over ranks that share a sequence, each kind against a plain softmax, and how sequences are shared."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from models.attention import AttentionCore
from models.config import Attention
from parallel.context import GatheredCore, RingCore, UlyssesCore
from parallel.sequence import SequenceShare
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch211

BATCH, HEADS, LENGTH, SIZE = 2, 8, 16, 6
KINDS = {"gather": GatheredCore, "ring": RingCore, "ulysses": UlyssesCore}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 2 + [2] * 5])


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Each token against those before it and itself, of its own document."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def heads_of(groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(BATCH, heads, LENGTH, SIZE) for heads in (HEADS, groups, groups, HEADS)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def differences(cases: list[tuple[str, int, bool]]) -> list[float]:
    """The largest of the result and the gradients of q, k and v."""
    share = SequenceShare(init_device_mesh("cpu", (dist.get_world_size(),)))
    own = share.positions(LENGTH, torch.device("cpu"))
    found = []
    for kind, groups, has_documents in cases:
        q, k, v, weights = heads_of(groups)
        whole = [q, k, v]
        documents = DOCUMENTS if has_documents else None
        parts = [part[:, :, own].requires_grad_() for part in whole]
        core: Any = KINDS[kind](AttentionCore(Attention.auto, 0.0), share)
        attended = core(*parts, None, documents)
        (attended * weights[:, :, own]).sum().backward()

        for part in whole:
            part.requires_grad_()
        expected = plain(q, k, v, documents)
        (expected * weights).sum().backward()
        pairs = [(attended, expected), *((part.grad, of.grad) for part, of in zip(parts, whole, strict=True))]
        found.append(max(float((mine - of[:, :, own]).detach().abs().max()) for mine, of in pairs))  # type: ignore[index]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_gives_what_one_rank_gives(ranks: int) -> None:
    """With as many heads of keys and values as of queries and with fewer, with documents and without."""
    cases = [(kind, groups, documents) for kind in KINDS for groups in (8, 4) for documents in (False, True)]
    for of_rank in run_ranks(ranks, differences, cases, group=True):
        for case, difference in zip(cases, of_rank, strict=True):
            assert difference < 1e-12, case


def shared() -> tuple[list[int], dict[str, Any], Tensor]:
    share = SequenceShare(init_device_mesh("cpu", (dist.get_world_size(),)))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    cut = share.cut({"tokens": tokens, "labels": tokens + 1, "documents": DOCUMENTS, "reduction": "none"})
    return share.positions(LENGTH, torch.device("cpu")).tolist(), cut, share.whole(cut["tokens"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_labels_and_positions_are_cut_alike_and_come_back_in_order(ranks: int) -> None:
    """Positions count the sequence, not the rank's share of it, and causal attention costs every rank the same."""
    seen = []
    for places, cut, whole in run_ranks(ranks, shared, group=True):
        assert cut["tokens"].tolist() == [places, [place + LENGTH for place in places]]
        assert torch.equal(cut["labels"], cut["tokens"] + 1)
        assert cut["positions"].tolist() == [places, places]
        assert torch.equal(cut["documents"], DOCUMENTS) and cut["reduction"] == "none"
        assert torch.equal(whole, torch.arange(2 * LENGTH).view(2, LENGTH))
        assert sum(place + 1 for place in places) == LENGTH * (LENGTH + 1) / 2 / ranks
        seen += places
    assert sorted(seen) == list(range(LENGTH))
