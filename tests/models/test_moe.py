"""Mixture of experts against a loop over tokens and experts."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config import Balance, ModelConfig, Score
from models.config import MoE as Experts
from models.moe import MoE, balance, grouped_product, looped_product, within_capacity
from models.roles import Role, parameter_roles
from parallel.precision import LowPrecision
from tests.models.build import largest_difference, random_decoder, random_tokens, tiny

pytestmark = pytest.mark.torch211

DIM, BATCH, SEQ = 24, 3, 10


def config(**moe: Any) -> ModelConfig:
    return tiny(layers=1, dim=DIM, context=SEQ, moe=Experts(**({"experts": 5, "dim": 16} | moe)))


def layer(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A MoE alone. The bias of the choice is of the size of the scores."""
    found: Any = random_decoder(config, seed, dtype).blocks["0"]
    moe = found.feedforward
    with torch.no_grad():
        moe.router.bias *= 0.3
        moe.router.load.zero_()
    return moe


def inputs(seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, SEQ, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ranked(preferred: list[float]) -> list[int]:
    """Experts, the most preferred first; of equals the lower index."""
    return sorted(range(len(preferred)), key=lambda expert: (-preferred[expert], expert))


def token_by_token(moe: Any, x: Tensor, settings: Experts) -> Tensor:
    """What MoE gives without capacity, by the definition."""
    found = []
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        scores = logits.softmax(-1) if settings.score is Score.softmax else 1 / (1 + (-logits).exp())
        chosen = ranked((scores + moe.router.bias).tolist())[: settings.top_k]
        weights = scores[chosen] / scores[chosen].sum() if settings.normalize else scores[chosen]
        y = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            hidden = F.gelu(moe.experts.up[expert] @ token, approximate="tanh")
            y = y + settings.scale * weight * (moe.experts.down[expert] @ hidden)
        if moe.shared is not None:
            y = y + moe.shared(token)
        found.append(y)
    return torch.stack(found).view_as(x)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1, "normalize": False},
        {"top_k": 5, "score": Score.sigmoid},
        {"top_k": 3, "score": Score.sigmoid, "scale": 2.5, "shared": 2},
    ],
    ids=str,
)
def test_it_is_the_loop_over_tokens_and_experts(settings: dict[str, Any]) -> None:
    """Output and every gradient; of the loads they are counts."""
    of, x = config(**settings), inputs().requires_grad_()
    moe = layer(of)
    learned = [x, *(p for name, p in moe.named_parameters() if p.requires_grad and name != "router.load")]
    expected = token_by_token(moe, x, of.moe)
    wanted = torch.autograd.grad(expected.square().sum(), learned, allow_unused=True)
    y = moe(x, None)
    found = torch.autograd.grad(y.square().sum(), learned)
    assert largest_difference(y, expected) <= 1e-12
    for one, other in zip(found, wanted, strict=True):
        assert largest_difference(one, torch.zeros_like(one) if other is None else other) <= 1e-10


def test_in_float32_products_are_grouped() -> None:
    """DIM and width are multiples of 16 bytes."""
    moe, x = layer(config(), dtype=torch.float32), inputs(dtype=torch.float32)
    assert largest_difference(moe(x, None), token_by_token(moe, x, config().moe)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_loop(dtype: torch.dtype) -> None:
    """Also where an expert has no rows, as the first and third, and in the gradients."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 24, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(4, 16, 24, generator=generator).to(dtype).requires_grad_()
    counts = torch.tensor([0, 5, 0, 2])
    slope = torch.randn(7, 16, generator=generator).to(dtype)
    found = [
        torch.autograd.grad(by(rows, weights, counts), [rows, weights], slope)
        for by in (grouped_product, looped_product)
    ]
    outputs = [by(rows, weights, counts) for by in (grouped_product, looped_product)]
    close = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for one, other in zip([outputs[0], *found[0]], [outputs[1], *found[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    assert not found[0][1][[0, 2]].any() and not found[1][1][[0, 2]].any()


def test_unaligned_rows_have_a_product_too() -> None:
    rows, weights = torch.ones(3, 5), torch.ones(2, 7, 5)
    assert torch.equal(grouped_product(rows, weights, torch.tensor([1, 2])), torch.full((3, 7), 5.0))


@pytest.mark.parametrize("score", Score)
def test_of_equal_scores_the_lower_index_is_chosen(score: Score) -> None:
    """H3. More experts than any unstable sort leaves in order."""
    moe = layer(config(experts=300, top_k=4, score=score))
    with torch.no_grad():
        moe.router.bias.zero_()
        moe.router.weight.zero_()
        moe.router.weight[100:, 0] = 1.0
    x = torch.zeros(1, 2, DIM, dtype=torch.float64)
    x[0, 1, 0] = 1.0
    chosen, weights = moe.router(x, None)
    assert chosen[0].tolist() == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert torch.equal(weights, torch.full((1, 2, 4), 0.25, dtype=torch.float64))


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    moe, x = layer(config(normalize=False)), inputs()
    with torch.no_grad():
        moe.router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0]))
    chosen, weights = moe.router(x, None)
    assert (chosen == torch.tensor([1, 3])).all()
    scores = (x @ moe.router.weight.T).softmax(-1)
    assert largest_difference(weights, scores[..., [1, 3]]) <= 1e-15


def test_a_bf16_model_routes_as_in_float32() -> None:
    """H3. Logits whose differences bf16 loses: 1 + 2^-10 is 1 there. The router's weight stays in float32."""
    moe: Any = layer(config(experts=4, top_k=1, normalize=False), dtype=torch.float32)
    with torch.no_grad():
        moe.router.bias.zero_()
        moe.router.weight.zero_()
        moe.router.weight[:, 0] = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-9, 1 - 2**-10])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = moe

        def forward(self, x: Tensor) -> Any:
            assert self.moe.experts.up.dtype is torch.bfloat16
            return self.moe.router(x, None)

    x = torch.zeros(1, 1, DIM, dtype=torch.bfloat16)
    x[..., 0] = 1.0
    chosen, weights = LowPrecision(Model(), torch.bfloat16)(x)
    assert chosen.item() == 2
    assert weights.dtype is torch.float32


def test_experts_without_tokens_have_a_gradient_of_zero() -> None:
    """H5. One token, to one expert of five."""
    moe = layer(config(top_k=1, normalize=False))
    moe(inputs()[:1, :1], None).sum().backward()
    for name in ("up", "down"):
        gradient = moe.experts.get_parameter(name).grad
        assert gradient.flatten(1).any(1).sum() == 1
    assert moe.router.load.grad.sum() == 1


def accumulated(moe: Any, recomputed: bool) -> Tensor:
    """The loads' gradient after three micro-batches."""
    for seed in range(3):
        x = inputs(seed).requires_grad_()
        y = checkpoint(moe, x, None, use_reentrant=False) if recomputed else moe(x, None)
        y.sum().backward()
    counts: Tensor = moe.router.load.grad
    return counts


def test_tokens_are_counted_once() -> None:
    """H1. Whatever is computed again, over micro-batches, and not in an evaluation."""
    expected = torch.zeros(5, dtype=torch.float64)
    moe = layer(config())
    for seed in range(3):
        scores = (inputs(seed) @ moe.router.weight.T).softmax(-1) + moe.router.bias
        for token in scores.flatten(0, 1).tolist():
            expected[ranked(token)[:2]] += 1
    assert expected.sum() == 3 * BATCH * SEQ * 2
    assert torch.equal(accumulated(layer(config()), recomputed=False), expected)
    assert torch.equal(accumulated(layer(config()), recomputed=True), expected)
    moe.eval()(inputs().requires_grad_(), None).sum().backward()
    assert moe.router.load.grad is None and not moe.router.load.any()


def test_balance_moves_the_bias_against_the_load() -> None:
    moe = layer(config(bias_rate=0.1))
    model = nn.ModuleList([moe])
    before = moe.router.bias.clone()
    moe.router.load.grad = torch.tensor([4.0, 1.0, 3.0, 3.0, 4.0], dtype=torch.float64)  # 3 is the mean
    balance(model, torch.ones(()))
    assert torch.equal(moe.router.bias, before) and not moe.router.load.any()
    balance(model, torch.zeros(()))
    moved = torch.tensor([-0.1, 0.1, 0.0, 0.0, -0.1], dtype=torch.float64)
    torch.testing.assert_close(moe.router.bias - before, moved, rtol=0, atol=1e-15)
    assert moe.router.load.tolist() == [4, 1, 3, 3, 4]


def auxiliary(moe: Any, x: Tensor, settings: Experts, load: list[float]) -> Tensor:
    """The sum over tokens of the auxiliary losses, by their definitions."""
    number, top_k = settings.experts, settings.top_k
    total = torch.zeros((), dtype=x.dtype)
    for sequence in x:
        scores = []
        frequency = torch.zeros(number, dtype=x.dtype)
        for token in sequence:
            logits = moe.router.weight @ token
            score = logits.softmax(-1) if settings.score is Score.softmax else logits.sigmoid()
            frequency[ranked((score + moe.router.bias).tolist())[:top_k]] += number / (top_k * SEQ)
            scores.append(score / score.sum())
            total = total + settings.z_loss * logits.exp().sum().log() ** 2
        if settings.balance is Balance.step:
            frequency = number * torch.tensor(load, dtype=x.dtype) / max(sum(load), 1)
        if settings.balance is not Balance.none:
            total = total + settings.balance_weight * SEQ * (frequency * torch.stack(scores).mean(0)).sum()
    return total


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize(
    ("kind", "load"),
    [
        (Balance.none, [0.0] * 5),
        (Balance.sequence, [0.0] * 5),
        (Balance.step, [0.0] * 5),
        (Balance.step, [3.0, 0.0, 9.0, 2.0, 6.0]),
    ],
)
def test_auxiliary_losses_by_their_formulas(score: Score, kind: Balance, load: list[float]) -> None:
    """What they add to the gradients of the router and of the input, times the share of a token."""
    of = config(score=score, balance=kind, balance_weight=0.3, z_loss=0.2)
    plain, moe, x = layer(config(score=score)), layer(of), inputs().requires_grad_()
    with torch.no_grad():
        moe.router.share.fill_(0.125)
        moe.router.load.copy_(torch.tensor(load))
    without = torch.autograd.grad(plain(x, None).square().sum(), [x, plain.router.weight])
    found = torch.autograd.grad(moe(x, None).square().sum(), [x, moe.router.weight])
    wanted = torch.autograd.grad(0.125 * auxiliary(moe, x, of.moe, load), [x, moe.router.weight])
    assert wanted[1].norm() > 0.01
    for with_it, before, added in zip(found, without, wanted, strict=True):
        assert largest_difference(with_it - before, added) <= 1e-12


def kept_by_hand(
    chosen: Tensor, documents: list[list[int]], experts: int, factor: float
) -> Iterator[tuple[int, int, int]]:
    for row, sequence in enumerate(documents):
        for document in set(sequence):
            places = [place for place, other in enumerate(sequence) if other == document]
            room = [math.ceil(factor * len(places) * chosen.shape[2] / experts)] * experts
            for place in places:
                for rank, expert in enumerate(chosen[row, place].tolist()):
                    room[expert] -= 1
                    if room[expert] >= 0:
                        yield row, place, rank


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("packed", [False, True])
def test_capacity_is_of_each_document(packed: bool, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(2, 12, 6, generator=generator).argsort(-1)[..., :2]
    chosen[0, :6] = torch.tensor([3, 1])
    documents = [[4] * 5 + [2] * 7, [7] * 1 + [8] * 10 + [7] * 1] if packed else [[0] * 12] * 2
    if packed:
        documents[1][-1] = 9  # a document is a run of tokens
    kept = within_capacity(chosen, torch.tensor(documents) if packed else None, 6, factor)
    assert {tuple(place) for place in kept.nonzero().tolist()} == set(kept_by_hand(chosen, documents, 6, factor))
    assert 0 < kept.sum() < kept.numel()


def test_what_is_dropped_has_no_weight_and_is_counted() -> None:
    """In training; an evaluation drops nothing."""
    of = config(experts=4, top_k=1, normalize=False, capacity_factor=1.0)
    moe, x = layer(of), inputs()
    with torch.no_grad():
        moe.router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    _, weights = moe.router(x, None)
    assert (weights.squeeze(-1) > 0).tolist() == [[place < 3 for place in range(SEQ)]] * BATCH  # 10 / 4, rounded up
    y = moe(x, None)
    assert y[:, :3].any(-1).all() and not y[:, 3:].any()
    y.sum().backward()
    assert moe.router.dropped.grad.item() == BATCH * (SEQ - 3)
    assert moe.router.load.grad.tolist() == [BATCH * SEQ, 0, 0, 0]
    assert moe.eval()(x, None).any(-1).all()


def test_forced_balance_takes_experts_in_turn() -> None:
    """In each sequence, so that neither the micro-batch nor the layout changes it."""
    moe = layer(config(experts=4, top_k=3, forced_balance=True))
    chosen, _ = moe.router(inputs(), None)
    for sequence in chosen:
        assert sequence.flatten().tolist() == [place % 4 for place in range(3 * SEQ)]


def test_first_blocks_are_dense() -> None:
    model = random_decoder(tiny(layers=3, moe=Experts(experts=4, dense_layers=2)))
    assert [isinstance(block.feedforward, MoE) for block in model.blocks.values()] == [False, False, True]
    roles = parameter_roles(model)
    assert roles["blocks.2.feedforward.router.weight"] is Role.router
    assert {name for name, role in roles.items() if role is Role.balance} == {
        f"blocks.2.feedforward.router.{name}" for name in ("load", "bias", "dropped")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_block_is_one_graph(dtype: torch.dtype, backend: str) -> None:
    """With all that a router can do; grouped products in float32, looped in float64."""
    settings = {"balance": Balance.sequence, "z_loss": 0.1, "capacity_factor": 1.0, "shared": 1}
    of = config(**settings)
    tokens = random_tokens(of, 2, SEQ)
    documents = torch.tensor([[0] * 4 + [1] * 6] * 2)
    found = []
    for compiled in (False, True):
        model = random_decoder(of, dtype=dtype)
        if compiled:
            for block in model.blocks.values():
                block.compile(fullgraph=True, backend=backend)
        loss: Any = model(tokens=tokens, labels=tokens, documents=documents)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(4, 2, 3), (2, 1, 4), (4, 3, 5), (3, 3, 2)])
def test_experts_are_chosen_from_the_best_groups(groups: int, top_groups: int, top_k: int) -> None:
    """DeepSeek-V3, 2.1.2. Scores are of few values, so that many are equal: the lower index comes first."""
    each = 4 if groups == 2 else 3
    experts = groups * each
    router = layer(
        config(experts=experts, top_k=top_k, groups=groups, top_groups=top_groups, score=Score.sigmoid)
    ).router
    scores = torch.randint(1, 4, (BATCH, SEQ, experts), generator=torch.Generator().manual_seed(4)).double() / 4
    with torch.no_grad():
        router.bias.copy_(torch.randint(2, (experts,), generator=torch.Generator().manual_seed(5)) / 4)
    chosen = router._choose(scores)
    for row in range(BATCH):
        for place in range(SEQ):
            preferred = (scores[row, place] + router.bias).tolist()
            sums = [sum(sorted(preferred[g * each : (g + 1) * each])[-2:]) for g in range(groups)]
            best = ranked(sums)[:top_groups]
            order = [expert for expert in ranked(preferred) if expert // each in best]
            assert chosen[row, place].tolist() == order[:top_k]
