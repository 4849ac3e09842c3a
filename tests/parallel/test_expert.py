"""Experts on other ranks give what they give on one, also where a rank or an expert has no tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models.config import ModelConfig, MoE
from models.decoder import Decoder
from parallel.expert import cut_experts
from parallel.local import local
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch211

EXPERTS, DIM, TOKENS = 4, 8, 6
CHOICES = {
    "each token others": [[(token + k) % EXPERTS for k in range(2)] for token in range(TOKENS)],
    "one rank's experts only": [[0, 1]] * TOKENS,
    "one expert of each rank only": [[1, 2]] * TOKENS,
    "none of the first rank's": [[2, 3]] * TOKENS,
}


def plain(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Token by token."""
    rows = []
    for token in range(len(x)):
        given = [down[e] @ torch.nn.functional.gelu(up[e] @ x[token], approximate="tanh") for e in chosen[token]]
        rows.append(sum(weight * row for weight, row in zip(weights[token], given, strict=True)))
    return torch.stack(rows)


class Given(nn.Module):
    """In the place of a router."""

    def __init__(self, chosen: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.given = chosen, weights

    def forward(self, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.given


def differences(dtype: torch.dtype, tokens: int) -> dict[str, list[float]]:
    """Of the result and the gradients of tokens, weights and this rank's experts, relative to the largest value. Ranks
    have other tokens; poisoned memory shows what is read before it is written."""
    config = ModelConfig(layers=1, dim=DIM, heads=2, vocab_size=11, moe=MoE(experts=EXPERTS, dim=12))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    up, down = random(EXPERTS, 12, DIM).requires_grad_(), random(EXPERTS, DIM, 12).requires_grad_()
    inputs = [(random(tokens, DIM), random(tokens, 2), random(tokens, DIM)) for _ in range(ranks)]
    found: dict[str, list[float]] = {}
    for name, choice in CHOICES.items():
        with torch.device("meta"):
            model = Decoder(config)
        cut_experts(model, mesh)
        model.to_empty(device="cpu").to(dtype)
        moe: Any = model.blocks["0"].feedforward
        each = EXPERTS // ranks
        with torch.no_grad():
            for parameter, value in ((moe.experts.up, up), (moe.experts.down, down)):
                local(parameter).copy_(value[rank * each : (rank + 1) * each])
        chosen = torch.tensor(choice[:tokens])
        torch.full((4096,), torch.nan)
        x, weights, of_result = (part.clone() for part in inputs[rank])
        moe.router = Given(chosen[None], weights.requires_grad_()[None])
        y = moe(x.requires_grad_()[None], None)[0]
        (y * of_result).sum().backward()

        up.grad = down.grad = None
        wanted = []
        for own, share, gradient in inputs:
            own, share = own.clone().requires_grad_(), share.clone().requires_grad_()
            expected = plain(own, chosen, share, up, down)
            (expected * gradient).sum().backward()
            wanted.append((expected, own.grad, share.grad))
        assert up.grad is not None and down.grad is not None
        mine = slice(rank * each, (rank + 1) * each)
        pairs = list(zip((y, x.grad, weights.grad), wanted[rank], strict=True))
        pairs += [(local(moe.experts.up.grad), up.grad[mine]), (local(moe.experts.down.grad), down.grad[mine])]
        found[name] = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, 1])
def test_tokens_go_to_other_ranks_and_come_back(ranks: int, tokens: int) -> None:
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for of_rank in run_ranks(ranks, differences, dtype, tokens, group=True):
            for name, found in of_rank.items():
                assert max(found) < bound, (dtype, name, found)
