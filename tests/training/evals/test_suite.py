"""The suite as a whole: the same on any number of ranks, and without a trace in the run."""

import json
import pickle
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.training.evals.fakes import forward, tokens_of, words
from training.config import EvalsConfig
from training.evals.baselines import baselines
from training.evals.loss import row_nats
from training.evals.ngram import bits_per_byte
from training.evals.suite import Suite
from training.evals.task import Score
from training.ranks import Ranks
from training.tokenizers import Bytes

TEXTS = [words(f"document {i}", 120 + 10 * i) for i in range(6)]


def prepared(heldout: list[str], train: list[str]) -> Any:
    tokenizer = Bytes()
    return SimpleNamespace(train=tokens_of(train, tokenizer), heldout=tokens_of(heldout, tokenizer))


def suite(texts: list[str], length: int = 32, one_shape: bool = False, **keys: Any) -> Suite:
    config = EvalsConfig(**{"heldout_tokens": 1500, "continuation_items": 9, "batch_sequences": 5} | keys)
    return Suite(config, prepared(texts, []), Bytes(), length, one_shape)


Case = tuple[list[str], dict[str, Any]]
Shapes = list[tuple[int, ...]]


def score_on_rank(cases: list[Case], data_ranks: int) -> list[tuple[list[Score], Shapes]]:
    """Scores and the shapes of all calls, for each case. Ranks r and r + data_ranks share the rows of data rank r."""
    import torch.distributed as dist

    ranks = Ranks(dist.group.WORLD)
    shapes: Shapes = []

    def collective(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        dist.all_reduce(torch.zeros(tokens.shape))  # hangs or fails where ranks differ in calls or shapes
        return forward(tokens, labels)

    results = []
    for texts, keys in cases:
        scores = suite(texts, **keys).score(collective, ranks, ranks.rank % data_ranks, data_ranks, "cpu")
        results.append((scores, shapes.copy()))
        shapes.clear()
    return results


@pytest.mark.parametrize(("count", "data_ranks"), [(2, 2), (3, 3), (4, 2)])
def test_same_scores_on_any_number_of_ranks(count: int, data_ranks: int) -> None:
    """Last batches that are ragged, batches of one, and fewer rows than ranks, of which some then have none."""
    cases: list[Case] = [
        (TEXTS, {}),
        (TEXTS, {"batch_sequences": 1, "heldout_tokens": 700}),
        (TEXTS, {"batch_sequences": 1000}),
        (["tiny"], {}),  # one window for all ranks
        (["sixty-three bytes of text for two windows on two or three ranks"], {"tasks": ["heldout"]}),
        ([], {}),
    ]
    alone = [suite(texts, **keys).score(forward, Ranks.alone(), 0, 1, "cpu") for texts, keys in cases]
    assert [len(scores) for scores in alone] == [4, 4, 4, 3, 3, 0]
    every = run_ranks(count, score_on_rank, cases, data_ranks, group=True)
    for case, expected in enumerate(alone):
        for rank in range(count):
            scores, shapes = every[rank][case]
            assert scores == expected  # bitwise: rows are summed one by one, then in the order of the text
            assert shapes == every[0][case][1]


@pytest.mark.parametrize(("count", "data_ranks"), [(1, 1), (4, 2)])
def test_one_shape_for_all_tasks_gives_the_same_scores(count: int, data_ranks: int) -> None:
    """A narrow task, whose rows are padded, with a wide one that has few rows."""
    keys: dict[str, Any] = {"heldout_tokens": 1500, "batch_sequences": 100}
    apart = suite(TEXTS, length=500, **keys)
    assert apart.shapes(1) == [(3, 500), (36, 319)] and apart.shapes(2) == [(2, 500), (18, 319)]
    expected = apart.score(forward, Ranks.alone(), 0, 1, "cpu")
    case = (TEXTS, {"length": 500, "one_shape": True, **keys})
    for scores, shapes in run_ranks(count, score_on_rank, [case], data_ranks, group=True)[0]:
        assert scores == expected
        assert set(shapes) == {(4 - data_ranks, 500)}


def test_row_order_is_the_order_of_the_text() -> None:
    """Rows have different losses, and each comes back at its place."""
    built = suite(TEXTS, batch_sequences=3).tasks[0]
    nats = row_nats(forward, built.rows, (3, built.rows.width), Ranks.alone(), 0, 1, "cpu")
    tokens, labels = built.rows.make(0, built.rows.count)
    expected = forward(torch.from_numpy(tokens), torch.from_numpy(labels)).double().sum(1).numpy()
    assert len(set(expected)) > 30
    np.testing.assert_array_equal(nats[:, 0], expected)


def test_no_trace_in_the_run() -> None:
    """Random states are untouched, no graph is built, and inputs are what the interface says."""
    weight = torch.nn.Parameter(torch.ones(1))
    seen: list[bool] = []

    def model(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = forward(tokens, labels) * weight
        seen.append(losses.requires_grad)
        return losses

    def states() -> list[bytes]:
        return [
            pickle.dumps(state) for state in (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
        ]

    before = states()
    suite(TEXTS).score(model, Ranks.alone(), 0, 1, "cpu")
    assert states() == before
    assert seen and not any(seen)
    assert torch.is_grad_enabled()


def test_scores_are_records() -> None:
    scores = suite(TEXTS).score(forward, Ranks.alone(), 0, 1, "cpu")
    assert [(s.task, s.metric) for s in scores] == [
        ("heldout", "loss"),
        ("heldout", "perplexity"),
        ("heldout", "bits_per_byte"),
        ("continuation", "accuracy"),
    ]
    for score in scores:
        record = json.loads(json.dumps(asdict(score)))
        assert Score(**record) == score
        assert len(score.items_hash) == 64


def test_notes_say_what_is_missing() -> None:
    assert suite(TEXTS).notes == []
    assert suite([], tasks=[]).notes == []
    (few,) = suite(TEXTS, continuation_items=10_000).notes
    assert "not 10000" in few and "data.heldout" in few
    assert len(suite([]).notes) == 2


def test_baselines_see_the_documents_the_model_is_scored_on() -> None:
    """Not more than the first document fits."""
    train = [words("train 0", 300), words("train 1", 300)]
    size = len(TEXTS[0]) + 1
    text = "".join(train).encode()
    expected = {name: bits_per_byte(text, TEXTS[0].encode(), order) for name, order in [("bigram", 2), ("trigram", 3)]}
    assert baselines(prepared(TEXTS, train), Bytes(), size) == expected
    assert baselines(prepared(TEXTS, train), Bytes(), 10**6) != expected
    assert baselines(prepared([], train), Bytes(), size) == {}


def test_no_baselines_of_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.evals.baselines.MOST_BYTES", 1000)
    assert baselines(prepared(TEXTS, [words("train", 300)]), Bytes(), 500) == {}
