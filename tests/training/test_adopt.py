"""What is taken over from a checkpoint, and what does not fit it."""

from pathlib import Path

import pytest

from parallel.config import Dtype
from training.adopt import adopt, load_problems
from training.checkpoint.folders import Saved
from training.config import Config, TokenizerKind, leaves
from training.unresolved import digests


@pytest.fixture
def trained() -> Config:
    config = Config(seed=5, sequence_length=64)
    config.model.layers = 7
    config.precision.dtype = Dtype.fp32
    config.evals.tasks = ["heldout"]
    config.evals.heldout_tokens = 99
    config.optimizer.lr = 0.5
    return config


def saved(trained: Config, **texts: str) -> Saved:
    """texts: keys whose value came from the environment, with __ for the dot."""
    unresolved = {key.replace("__", "."): text for key, text in texts.items()}
    info = {"config": leaves(trained) | unresolved, "from_environment": digests(trained, unresolved)}
    return Saved(3, Path("x"), info, False)


def adopted(trained: Config, *given: str) -> Config:
    config = Config()
    assert adopt(config, saved(trained), frozenset(given)) == []
    return config


def test_what_scores_depend_on_is_the_checkpoints(trained: Config) -> None:
    config = adopted(trained)
    assert (config.model.layers, config.seed, config.sequence_length) == (7, 5, 64)
    assert config.precision.dtype is Dtype.fp32
    assert (config.evals.tasks, config.evals.heldout_tokens) == (["heldout"], 99)
    assert config.optimizer.lr == Config().optimizer.lr  # scores do not depend on it


@pytest.mark.parametrize("given", ["evals.heldout_tokens", "evals"])
def test_what_is_given_stays(trained: Config, given: str) -> None:
    assert adopted(trained, given).evals.heldout_tokens == Config().evals.heldout_tokens


def test_a_run_without_evaluations_is_scored_by_the_commands_suite(trained: Config) -> None:
    trained.evals.tasks = []
    assert adopted(trained).evals == Config().evals


TEXTS = {"model__layers": "${oc.env:DEPTH}", "precision__dtype": "${oc.env:DTYPE}", "optimizer__lr": "${oc.env:LR}"}


def test_values_of_the_environment_are_taken_from_it(trained: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """LR is not there, and not asked for: no score depends on it."""
    monkeypatch.setenv("DEPTH", "7")
    monkeypatch.setenv("DTYPE", "fp32")
    config = Config()
    assert adopt(config, saved(trained, **TEXTS), frozenset()) == []
    assert config.model.layers == 7 and config.precision.dtype is Dtype.fp32


def test_a_variable_that_is_gone_or_has_another_value_is_named(
    trained: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = adopt(Config(), saved(trained, model__layers="${oc.env:DEPTH}"), frozenset())
    assert problem.key == "model.layers" and "the environment has no DEPTH" in problem.reason
    monkeypatch.setenv("DEPTH", "8")
    (problem,) = adopt(Config(), saved(trained, model__layers="${oc.env:DEPTH}"), frozenset())
    assert str(problem).startswith("model.layers=8: x was trained with another value of ${oc.env:DEPTH}")
    assert adopt(Config(), saved(trained, model__layers="${oc.env:DEPTH}"), frozenset(["model.layers"])) == []


def test_weights_fit_whatever_their_config_came_from(trained: Config) -> None:
    """Known by its digest, also where the variable is gone."""
    source = saved(trained, model__layers="${oc.env:DEPTH}")
    assert load_problems(trained, source) == []
    trained.model.layers = 8
    (problem,) = load_problems(trained, source)
    assert str(problem).startswith("model.layers=8: x was trained with another value of ${oc.env:DEPTH}")


def test_another_tokenizer_is_the_mistake(trained: Config) -> None:
    trained.tokenizer.kind, trained.model.vocab_size = TokenizerKind.bytes, 257
    config = Config()
    config.tokenizer.kind = TokenizerKind.gpt2
    assert adopt(config, saved(trained), frozenset(["tokenizer"])) == []
    (problem,) = load_problems(config, saved(trained))
    assert str(problem) == "tokenizer.kind=gpt2: x was trained with bytes\n    instead: tokenizer=bytes"


def test_a_vocabulary_that_is_not_known_yet_is_not_compared(trained: Config) -> None:
    trained.tokenizer.kind, trained.model.vocab_size = TokenizerKind.huggingface, 5000
    source = saved(trained)
    trained.model.vocab_size = None
    assert load_problems(trained, source) == []
