"""What eval_only takes over from a checkpoint."""

from pathlib import Path

import pytest

from parallel.config import Dtype
from training.adopt import adopt
from training.checkpoint.folders import Saved
from training.config import Config, leaves


@pytest.fixture
def trained() -> Config:
    config = Config(seed=5, sequence_length=64)
    config.model.layers = 7
    config.precision.dtype = Dtype.fp32
    config.evals.tasks = ["heldout"]
    config.evals.heldout_tokens = 99
    config.optimizer.lr = 0.5
    return config


def adopted(trained: Config, *given: str) -> Config:
    config = Config()
    adopt(config, Saved(3, Path("x"), {"config": leaves(trained)}, False), frozenset(given))
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
