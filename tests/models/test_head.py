"""The loss: what counts, what does not, and that padding does not exist."""

import pytest
import torch
from torch import Tensor

from models.head import IGNORED, Head
from tests.models.build import largest_difference, tiny

BATCH, SEQ, VOCABULARY, PADDED = 3, 5, 67, 96


def case(dtype: torch.dtype = torch.float64) -> tuple[Head, Tensor, Tensor]:
    """A head with random weights, also in the padding, its input and labels."""
    generator = torch.Generator().manual_seed(0)
    head = Head(tiny()).to(dtype)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    x = torch.randn(BATCH, SEQ, 24, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (BATCH, SEQ), generator=generator)
    labels[0, 1] = labels[2, 4] = IGNORED
    return head, x, labels


def expected_losses(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    """-log of the label's share of the exponentials of the 67 scores, 0 where ignored."""
    scores = x.detach().double() @ head.weight.detach().double()[:VOCABULARY].T
    shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
    own = shares.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORED, 0.0, -own.log())


def test_sum_and_none() -> None:
    head, x, labels = case()
    each = head(x, labels, "none")
    assert each.shape == (BATCH, SEQ)
    assert largest_difference(each, expected_losses(head, x, labels)) <= 1e-12
    assert (each == 0).nonzero().tolist() == [[0, 1], [2, 4]]
    total = head(x, labels, "sum")
    assert total.shape == (1,)
    assert largest_difference(total, each.sum()[None]) <= 1e-12


def test_ignored_labels_have_no_gradient() -> None:
    head, x, labels = case()
    head(x, labels, "sum").backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(-1) == 0).nonzero().tolist() == [[0, 1], [2, 4]]


def test_with_all_labels_ignored_the_loss_is_zero_and_finite() -> None:
    head, x, labels = case()
    loss = head(x, torch.full_like(labels, IGNORED), "sum")
    loss.backward()
    assert loss.tolist() == [0.0]
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_padding_has_no_score_no_probability_and_no_gradient() -> None:
    head, x, labels = case()
    assert head.weight.shape == (PADDED, 24)
    assert head(x, None, "sum").shape == (BATCH, SEQ, VOCABULARY)
    before = head(x, labels, "none")
    with torch.no_grad():
        head.weight[VOCABULARY:] = 1e4
    assert torch.equal(head(x, labels, "none"), before)
    head(x, labels, "sum").backward()
    assert head.weight.grad is not None
    assert (head.weight.grad.abs().sum(-1) > 0).tolist() == [True] * VOCABULARY + [False] * (PADDED - VOCABULARY)


def test_a_label_in_the_padding_is_an_error() -> None:
    head, x, labels = case()
    labels[1, 1] = VOCABULARY
    with pytest.raises(IndexError):
        head(x, labels, "sum")


@pytest.mark.parametrize(
    ("computed", "loss"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_loss_is_float32_or_wider(computed: torch.dtype, loss: torch.dtype) -> None:
    head, x, labels = case(computed)
    assert head(x, None, "sum").dtype is computed
    for reduction in ("sum", "none"):
        losses = head(x, labels, reduction)
        assert losses.dtype is loss
    scores = head(x, None, "sum").detach().double()
    exact = torch.logsumexp(scores, -1) - scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert largest_difference(losses.double(), torch.where(labels == IGNORED, 0.0, exact)) <= 1e-5
