"""The items and their scoring."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.evals.fakes import MergingTokenizer, forward, token_loss, tokens_of, words
from training.evals.continuation import CHOICE_BYTES, CHOICES, Continuation, Item, build_items, encode_pair, find_cuts
from training.evals.loss import row_nats
from training.evals.task import IGNORED
from training.ranks import Ranks
from training.tokenizers import Bytes

TEXTS = [words(f"document {i}", 150 + 10 * i) for i in range(6)]


def accuracy(task: Continuation, model: object = forward) -> float:
    nats = row_nats(model, task.rows, (8, task.rows.width), Ranks.alone(), 0, 1, "cpu")  # type: ignore[arg-type]
    (score,) = task.scores(nats)
    assert score.n == len(task.items)
    return score.value


def rows_of(task: Continuation) -> list[tuple[Item, str]]:
    return [(item, choice) for item in task.items for choice in item.choices]


def test_items_are_what_they_say() -> None:
    items = build_items(tokens_of(TEXTS, Bytes()), Bytes(), 40)
    assert len(items) == 40
    for item in items:
        right = item.choices[item.answer]
        (home,) = [text for text in TEXTS if item.context + right in text]
        assert len(item.context) == min(256, home.index(item.context + right) + len(item.context)) >= 64
        assert len(set(item.choices)) == CHOICES
        assert all(len(choice.encode()) == CHOICE_BYTES for choice in item.choices)
        assert all(choice[0] == " " and item.context[-1] != " " for choice in item.choices)
        for wrong in set(item.choices) - {right}:
            assert wrong not in home
            assert any(wrong in text for text in TEXTS)
    places = sorted((item.context[-32:], item.answer) for item in items)
    assert len(set(places)) == 40
    assert {item.answer for item in items} == {0, 1, 2, 3}


def test_scored_places_do_not_overlap() -> None:
    items = build_items(tokens_of(TEXTS, Bytes()), Bytes(), 1000)
    assert len(items) < 1000
    places = []
    for item in items:
        (document,) = [i for i, text in enumerate(TEXTS) if item.context + item.choices[item.answer] in text]
        places.append((document, TEXTS[document].index(item.context + item.choices[item.answer]) + len(item.context)))
    places.sort()
    for (document, begin), (other, following) in pairwise(places):
        assert document != other or following - begin >= CHOICE_BYTES


def test_fewer_items_begin_as_more_do() -> None:
    tokens = tokens_of(TEXTS, Bytes())
    assert build_items(tokens, Bytes(), 40)[:7] == build_items(tokens, Bytes(), 7)


def test_items_do_not_depend_on_the_tokenizer_and_stay_what_they_are() -> None:
    """The hash is pinned: scores of the suite compare only while the items do not change."""
    merging = MergingTokenizer([b" a", b" b", b"cd", b"ef", b"gh"])
    hashes = {
        Continuation(tokens_of(TEXTS, tokenizer), tokenizer, 20, length).items_hash
        for tokenizer in (Bytes(), merging)
        for length in (64, 128)
    }
    assert hashes == {"73eecea647ea3eac0b7aee4a8c8f4a3f6e65af05007531bb10ceda1c56ad6b09"}


@pytest.mark.parametrize("texts", [[], TEXTS[:3], ["short"] * 20, ["the same text " * 40] * 8])
def test_too_little_text_gives_no_items(texts: list[str]) -> None:
    assert build_items(tokens_of(texts, Bytes()), Bytes(), 5) == []


def test_text_without_spaces_and_with_long_characters() -> None:
    texts = [words(f"漢 {i}", 600, alphabet="漢字仮名交文").replace(" ", "") for i in range(5)]
    items = build_items(tokens_of(texts, Bytes()), Bytes(), 10)
    assert items == []  # 64 bytes are no whole number of characters of 3 bytes
    texts = [words(f"漢 {i}", 600, alphabet="漢字仮名交文").replace(" ", "x") for i in range(5)]
    items = build_items(tokens_of(texts, Bytes()), Bytes(), 10)
    assert len(items) == 10
    assert all(len(choice.encode()) == CHOICE_BYTES for item in items for choice in item.choices)


@settings(deadline=None, max_examples=100)
@given(st.text("ab é漢\n😀", min_size=0, max_size=200))
def test_cuts_split_no_character(text: str) -> None:
    encoded = text.encode()
    for cut in find_cuts(encoded).tolist():
        assert 1 <= cut <= len(encoded) - CHOICE_BYTES
        end = cut + CHOICE_BYTES
        assert encoded[:cut].decode() + encoded[cut:end].decode() + encoded[end:].decode() == text


def test_cuts_are_after_words() -> None:
    text = b"ab cd  e\tf" + b"x" * 63
    assert find_cuts(text).tolist() == [2, 5, 8]
    assert find_cuts(b"x" * 66).tolist() == [1, 2]
    assert find_cuts(b"x" * 64).tolist() == []


def test_pairs_are_split_as_lm_eval_splits_them() -> None:
    """Its rule by hand: spaces at the context's end belong to what follows; the context has the tokens it has alone."""
    tokenizer = MergingTokenizer([b" world", b"lo w", b"hel"])
    assert encode_pair(tokenizer, "hey", " world") == ([104, 101, 121], [257])
    assert encode_pair(tokenizer, "hey ", "world") == ([104, 101, 121], [257])
    assert encode_pair(tokenizer, "hey \n", "you") == ([104, 101, 121], [32, 10, 121, 111, 117])
    # "hello" alone is hel, l, o: 3 tokens; "hello w" together is hel, "lo w".
    assert encode_pair(tokenizer, "hello", " wide") == ([259, 258, 105], [100, 101])
    assert encode_pair(tokenizer, "", "hel") == ([256], [259])
    assert encode_pair(tokenizer, "  ", "hel") == ([256], [32, 32, 259])


def test_labels_are_the_continuation_alone() -> None:
    task = Continuation(tokens_of(TEXTS, Bytes()), Bytes(), 3, sequence_length=1000)
    tokens, labels = task.rows.make(0, task.rows.count)
    for row, (item, choice) in enumerate(rows_of(task)):
        whole = (item.context + choice).encode()
        assert bytes(tokens[row, : len(whole) - 1].tolist()) == whole[:-1]
        assert (tokens[row, len(whole) - 1 :] == 256).all()
        scored = labels[row] != IGNORED
        assert bytes(labels[row, scored].tolist()).decode() == choice
        assert scored.nonzero()[0].tolist() == list(range(len(whole) - 1 - CHOICE_BYTES, len(whole) - 1))


@pytest.mark.parametrize("length", [16, 64, 65, 80])
def test_a_short_window_cuts_the_left(length: int) -> None:
    task = Continuation(tokens_of(TEXTS, Bytes()), Bytes(), 3, sequence_length=length)
    tokens, labels = task.rows.make(0, task.rows.count)
    assert tokens.shape == (12, length)
    for row, (item, choice) in enumerate(rows_of(task)):
        whole = (item.context + choice).encode()
        assert bytes(tokens[row].tolist()) == whole[-length - 1 : -1]
        assert bytes(labels[row, labels[row] != IGNORED].tolist()) == choice.encode()[-length:]


def test_accuracy_against_a_loop() -> None:
    for tokenizer in (Bytes(), MergingTokenizer([b" a", b" b", b"cd", b"ef", b"gh"])):
        task = Continuation(tokens_of(TEXTS, tokenizer), tokenizer, 15, sequence_length=1000)
        right = 0
        for item in task.items:
            nats = []
            for choice in item.choices:
                context, target = tokenizer.encode(item.context), tokenizer.encode(choice)
                nats.append(sum(token_loss(context + target[:i], target[i]) for i in range(len(target))))
            right += nats.index(min(nats)) == item.answer
        assert 0 < right < 15
        assert accuracy(task) == right / 15


def test_a_model_that_knows_the_text_is_always_right() -> None:
    def knows(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(labels.shape)
        for row, t in (labels != IGNORED).nonzero().tolist():
            seen = bytes([*tokens[row, max(t - 20, 0) : t + 1].tolist(), int(labels[row, t])]).decode()
            losses[row, t] = 0.0 if any(seen in text for text in TEXTS) else 1.0
        return losses

    task = Continuation(tokens_of(TEXTS, Bytes()), Bytes(), 20, sequence_length=256)
    assert accuracy(task, knows) == 1.0
    assert accuracy(task, lambda tokens, labels: -knows(tokens, labels)) == 0.0
    assert accuracy(task, lambda tokens, labels: torch.full(labels.shape, math.nan)) == 0.0


def test_standard_error_is_that_of_lm_eval() -> None:
    """Sample standard deviation of the items' 0 and 1, over the root of their number."""
    task = Continuation(tokens_of(TEXTS, Bytes()), Bytes(), 10, sequence_length=64)
    nats = torch.ones(10, CHOICES, 2).double()
    for i, item in enumerate(task.items):
        nats[i, item.answer if i < 7 else (item.answer + 1) % CHOICES] = 0.0
    (score,) = task.scores(nats.reshape(-1, 2).numpy())
    outcomes = torch.tensor([1.0] * 7 + [0.0] * 3).double()
    assert score.value == pytest.approx(0.7)
    assert score.stderr == pytest.approx(float(outcomes.std() / math.sqrt(10)), rel=1e-12)
    task.items = task.items[:1]
    assert task.scores(nats[0].numpy())[0].stderr is None
