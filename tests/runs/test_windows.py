"""A window that grows over the run, against runs whose window is as wide from the start."""

import pytest

from models.config import ModelConfig
from tests.runs.drive import Runs
from training.windows import window_at

STEPS = "steps=4 checkpoint.every=2 metrics.every=1 schedule=constant optimizer.lr=0.05 model.full_every=2"


@pytest.mark.parametrize(
    ("window", "stages", "steps", "windows"),
    [(8, 2, 4, [4, 4, 8, 8]), (9, 2, 4, [5, 5, 9, 9]), (6, 3, 4, [2, 2, 4, 6]), (7, 1, 2, [7, 7]), (4, 3, 2, [2, 3])],
)
def test_window_of_each_step(window: int, stages: int, steps: int, windows: list[int]) -> None:
    assert [window_at(window, stages, step, steps) for step in range(steps)] == windows


def test_every_so_many_th_block_sees_all() -> None:
    config = ModelConfig(layers=5, window=8, full_every=2)
    assert [config.window_of(layer) for layer in range(5)] == [8, None, 8, None, 8]


def test_losses_are_those_of_the_window_of_the_step(runs: Runs) -> None:
    runs.finish("grows", f"{STEPS} model.window=8 model.window_stages=2")
    runs.finish("narrow", f"{STEPS} model.window=4")
    runs.finish("wide", f"{STEPS} model.window=8")
    grows, narrow, wide = ([line["loss"] for line in runs.records(name)] for name in ("grows", "narrow", "wide"))
    assert grows[:2] == narrow[:2] and grows[0] != wide[0]
    assert grows[2] != narrow[2]


def test_a_checkpoint_has_the_same_scores_again(runs: Runs) -> None:
    """Scores are always of the whole window, also of a checkpoint whose steps had a part of it."""
    runs.finish("scored", f"{STEPS} model.window=8 model.window_stages=2")
    runs.finish("again", f"eval_only=true checkpoint.load={runs.checkpoint('scored', 2)}")
    first = [line for line in runs.evals("scored") if line["step"] == 2]
    assert first and runs.evals("again") == first
