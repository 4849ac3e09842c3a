"""The decoder as a whole: what depends on what, in which dtype, and when values are dropped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.attention import AttentionCore
from models.config import Attention as Kernel
from models.config import ModelConfig
from models.decoder import Decoder
from tests.models.build import largest_difference, logits_of, random_decoder, random_tokens, tiny
from tests.ranks import run_ranks

ON_CPU = [Kernel.auto, Kernel.flash, Kernel.math]


@pytest.mark.parametrize("kernel", ON_CPU)
def test_no_logit_depends_on_a_later_token(kernel: Kernel) -> None:
    model = random_decoder(tiny(attention=kernel))
    tokens = random_tokens(model.config, 2, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 67
    before, after = logits_of(model, tokens), logits_of(model, changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("first", [5, 700])
def test_documents_do_not_see_each_other(kernel: Kernel, first: int) -> None:
    """700: longer than a kernel's blocks of keys, so that the second document sees nothing of some of them."""
    second = 9
    config = tiny(context=first + second, attention=kernel, layers=2)
    model = random_decoder(config)
    tokens = random_tokens(config, 2, first + second)
    documents = torch.tensor([3] * first + [1] * second).expand(2, -1)
    positions = torch.cat([torch.arange(first), torch.arange(second)]).expand(2, -1)
    packed = logits_of(model, tokens, positions=positions, documents=documents)

    other_first = tokens.clone()
    other_first[:, :first] = (other_first[:, :first] + 1) % 67
    after = logits_of(model, other_first, positions=positions, documents=documents)
    assert torch.equal(packed[:, first:], after[:, first:])
    assert (packed[:, :first] != after[:, :first]).any(-1).all()

    assert largest_difference(packed[:, first:], logits_of(model, tokens[:, first:])) <= 1e-5
    assert largest_difference(packed[:, :first], logits_of(model, tokens[:, :first])) <= 1e-5


def test_gradients_stay_in_their_document() -> None:
    """The second document's loss has a gradient for its own tokens' embeddings only."""
    model: Any = random_decoder(tiny(tied_head=False))
    tokens = torch.tensor([[1, 2, 3, 11, 12, 13]])
    labels = torch.tensor([[-100, -100, -100, 12, 13, 14]])
    model(tokens=tokens, labels=labels, documents=torch.tensor([[0, 0, 0, 1, 1, 1]])).backward()
    assert model.embed.tokens.weight.grad.any(-1).nonzero().flatten().tolist() == [11, 12, 13]


def test_positions_count_from_zero_where_not_given() -> None:
    model = random_decoder(tiny())
    tokens = random_tokens(model.config, 2, 8)
    plain = logits_of(model, tokens)
    assert torch.equal(plain, logits_of(model, tokens, positions=torch.arange(8).expand(2, -1)))
    assert not torch.allclose(plain, logits_of(model, tokens, positions=torch.arange(8).expand(2, -1) + 8), atol=1e-2)


def test_one_document_is_the_same_as_none_stated() -> None:
    model = random_decoder(tiny(), dtype=torch.float64)
    tokens = random_tokens(model.config, 2, 16)
    one = logits_of(model, tokens, documents=torch.full((2, 16), 7))
    assert largest_difference(logits_of(model, tokens), one) <= 1e-12


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    """Whatever its rows hold. They have no gradient either, tied or not."""
    for tied in (True, False):
        model: Any = random_decoder(tiny(tied_head=tied))
        tokens, labels = random_tokens(model.config, 2, 16), random_tokens(model.config, 2, 16, seed=2)
        before = model(tokens=tokens, labels=labels)
        with torch.no_grad():
            model.embed.tokens.weight[67:] = 100.0
            model.head.weight[67:] = 100.0
        loss = model(tokens=tokens, labels=labels)
        assert torch.equal(loss, before)
        loss.backward()
        for weight in (model.embed.tokens.weight, model.head.weight):
            assert weight.shape[0] == 96
            assert weight.grad[:67].any() and not weight.grad[67:].any()


def test_dropout_only_in_training() -> None:
    plain = random_decoder(tiny())
    dropping = random_decoder(tiny(dropout=0.5))
    tokens = random_tokens(plain.config, 2, 16)
    assert torch.equal(logits_of(dropping.eval(), tokens), logits_of(plain.eval(), tokens))
    assert torch.equal(logits_of(plain.train(), tokens), logits_of(plain.eval(), tokens))
    dropping.train()
    torch.manual_seed(0)
    first, second = logits_of(dropping, tokens), logits_of(dropping, tokens)
    assert not torch.allclose(first, second, atol=1e-2)
    torch.manual_seed(0)
    assert torch.equal(logits_of(dropping, tokens), first)


def test_dropout_is_in_the_four_places_of_gpt2() -> None:
    """After the embedding, in attention, and before both sums of a block; each with the stated share."""
    model = random_decoder(tiny(layers=1, dropout=0.25)).eval()
    tokens = random_tokens(model.config, 2, 16)
    plain = logits_of(model, tokens)
    places = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout | AttentionCore)}
    assert sorted(places) == [
        "blocks.0.attention.core",
        "blocks.0.attention.dropout",
        "blocks.0.feedforward.dropout",
        "embed.dropout",
    ]
    for name, module in places.items():
        module.train()
        assert not torch.allclose(logits_of(model, tokens), plain, atol=1e-2), name
        module.eval()
        if isinstance(module, nn.Dropout):
            assert module.p == 0.25
    one_token = torch.ones(4000, 1, 1, 1)
    torch.manual_seed(0)
    attended = places["blocks.0.attention.core"].train()(one_token, one_token, one_token, None, None)
    assert attended.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (attended == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_a_row_are_the_whole(tied: bool) -> None:
    """A pipeline stage is a Decoder without the parts it does not hold; its blocks keep their names."""
    config = tiny(layers=3, tied_head=tied)
    whole = random_decoder(config, dtype=torch.float64)
    first, last = (random_decoder(config, dtype=torch.float64) for _ in range(2))
    first.norm = first.head = None
    del first.blocks["2"]
    last.embed = None
    del last.blocks["0"], last.blocks["1"]
    names = set(whole.state_dict())
    assert set(first.state_dict()) | set(last.state_dict()) == names
    assert set(first.state_dict()).isdisjoint(last.state_dict())

    tokens, labels = random_tokens(config, 2, 16), random_tokens(config, 2, 16, seed=2)
    inputs: dict[str, Any] = {"tokens": tokens, "documents": (torch.arange(16) // 6).expand(2, -1)}
    stream = first(**inputs)
    assert isinstance(stream, tuple) and all(part.is_floating_point() for part in stream)
    assert torch.equal(last(*stream, **inputs, labels=labels), whole(**inputs, labels=labels))


def test_without_biases_there_are_none() -> None:
    model = random_decoder(tiny(bias=False))
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert logits_of(model, random_tokens(model.config, 2, 16)).isfinite().all()


def dtypes_of_a_step(config: ModelConfig, dtype: torch.dtype) -> tuple[set[torch.dtype], dict[str, torch.dtype]]:
    """Dtypes of all floating-point results of all operations in forward and backward, and of the gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.update(
                leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()
            )
            return out

    model = random_decoder(config, dtype=dtype).train()
    tokens, labels = random_tokens(config, 2, 16), random_tokens(config, 2, 16, seed=2)
    with Watch():
        for reduction in ("sum", "none"):
            for documents in (None, (torch.arange(16) // 6).expand(2, -1)):
                model(tokens=tokens, labels=labels, documents=documents, reduction=reduction).sum().backward()
    return seen, {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}


def test_float64_stays_float64_in_every_operation() -> None:
    for config in (tiny(), tiny(tied_head=False, attention=Kernel.math), tiny(dropout=0.1)):
        [(seen, gradients)] = run_ranks(1, dtypes_of_a_step, config, torch.float64)
        assert seen == {torch.float64}
        assert set(gradients) == {name for name, _ in Decoder(config).named_parameters()}
        assert set(gradients.values()) == {torch.float64}
