"""Latent attention against a restatement head by head and token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention import AttentionCore
from models.config import Attention as Kernel
from models.config import Latent, ModelConfig, Norm, Position
from models.latent import LatentAttention
from tests.models.build import largest_difference, random_decoder, tiny

pytestmark = pytest.mark.torch211

DIM, HEADS, SEQ, THETA = 24, 3, 9, 100.0
KV, Q, NOPE, ROPE, VALUE = 10, 14, 6, 4, 5


def config(**changes: Any) -> ModelConfig:
    changes = {"latent": Latent(KV, Q, NOPE, ROPE, VALUE), "norm_eps": 1e-3} | changes
    found = tiny(layers=1, position=Position.rotary, norm=Norm.rmsnorm, bias=False, **changes)
    found.rotary.theta = THETA
    return found


def layer(config: ModelConfig) -> LatentAttention:
    found: Any = random_decoder(config, dtype=torch.float64).blocks["0"]
    assert isinstance(found.attention, LatentAttention)
    return found.attention


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-3) * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Two numbers that stand half of the width apart are a complex number."""
    found = torch.empty_like(x)
    for pair in range(ROPE // 2):
        angle = position * THETA ** (-2 * pair / ROPE)
        a, b = x[pair], x[pair + ROPE // 2]
        found[pair] = a * math.cos(angle) - b * math.sin(angle)
        found[pair + ROPE // 2] = a * math.sin(angle) + b * math.cos(angle)
    return found


def restated(weights: dict[str, Tensor], x: Tensor, scale: float, positions: list[int], documents: list[int]) -> Tensor:
    """x: [seq, dim]."""
    found = []
    for here in range(len(x)):
        heads = []
        for head in range(HEADS):
            if "q.weight" in weights:
                queries = weights["q.weight"] @ x[here]
            else:
                narrow = normalized(weights["q_down.weight"] @ x[here], weights["q_norm.weight"])
                queries = weights["q_up.weight"] @ narrow
            q = queries[head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)]
            q = torch.cat([q[:NOPE], turned(q[NOPE:], positions[here])])
            scores, values = [], []
            for there in range(here + 1):
                if documents[there] != documents[here]:
                    continue
                down = weights["kv_down.weight"] @ x[there]
                up = weights["kv_up.weight"] @ normalized(down[:KV], weights["kv_norm.weight"])
                own = up[head * (NOPE + VALUE) : (head + 1) * (NOPE + VALUE)]
                k = torch.cat([own[:NOPE], turned(down[KV:], positions[there])])
                scores.append(q @ k * scale)
                values.append(own[NOPE:])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        found.append(weights["out.weight"] @ torch.cat(heads))
    return torch.stack(found)


@pytest.mark.parametrize("q_rank", [Q, None])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_against_each_head_and_token(q_rank: int | None, scale: float | None) -> None:
    attention = layer(config(latent=Latent(KV, q_rank, NOPE, ROPE, VALUE), attention_scale=scale))
    x = torch.randn(2, SEQ, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = {name: value.detach() for name, value in attention.named_parameters()}
    places, documents = torch.arange(SEQ), torch.tensor([0] * 4 + [1] * 5)
    for positions, of in ((None, None), (places + 7, documents)):
        given = [None if values is None else values.expand(2, -1) for values in (positions, of)]
        found = attention(x, *given)
        numbers = (places if positions is None else positions).tolist()
        ids = [0] * SEQ if of is None else of.tolist()
        for row in range(2):
            expected = restated(weights, x[row], scale or (NOPE + ROPE) ** -0.5, numbers, ids)
            assert largest_difference(found[row], expected) < 1e-12


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernel", [Kernel.auto, Kernel.flash, Kernel.math])
def test_narrow_values_in_every_kernel(kernel: Kernel, softcap: float | None) -> None:
    """Flash attention of torch knows one width; values are as many numbers as they were."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, HEADS, SEQ, 10, generator=generator) for _ in range(2))
    v = torch.randn(2, HEADS, SEQ, VALUE, generator=generator)
    scores = q @ k.transpose(2, 3) / math.sqrt(10)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    found = AttentionCore(kernel, 0.0, softcap=softcap)(q, k, v, None, None)
    assert largest_difference(found, expected) < 1e-5
