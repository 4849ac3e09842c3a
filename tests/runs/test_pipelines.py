"""A run with stages says what its bubble will be, and measures it."""

import re

import pytest
import torch

from tests.runs.drive import Runs, read_lines
from training.bubble import bubble_share, smaller_bubbles
from training.check import check
from training.compose import compose
from training.config import Config
from training.resolve import World, resolve

WORLD = World(2, 2)


def settled(words: list[str]) -> Config:
    config, chosen = compose(words)
    config.model.vocab_size = 257
    resolve(config, WORLD, chosen)
    assert check(config, WORLD) == [], words
    return config


@pytest.mark.torch211
@pytest.mark.parametrize(
    "words",
    [
        "parallel.schedule=gpipe",
        "activations=full",
        "compile=block parallel.schedule=looped_bfs parallel.stages_per_rank=3",
        "parallel.stage_layers=[2,10] micro_batch=1",
        "batch_sequences=4096 parallel.stage_layers=[2,10]",
    ],
)
def test_what_would_shrink_the_bubble_is_legal_and_does(words: str) -> None:
    """Exactly as it is written in the log."""
    given = {"parallel.pp": "2", "model.layers": "12", "steps": "9", "batch_sequences": "16", "micro_batch": "2"}
    given |= dict(word.split("=") for word in words.split())
    config = settled([f"{key}={value}" for key, value in given.items()])
    ways = smaller_bubbles(config, WORLD, "cpu")
    assert ways and [share for _, share in ways] == sorted(share for _, share in ways)
    for written, share in ways:
        other = given | dict(word.split("=") for word in written.split())
        assert bubble_share(settled([f"{key}={value}" for key, value in other.items()])) == pytest.approx(share)
        assert share < bubble_share(config)
    assert ("parallel.stage_layers=null" in dict(ways)) == ("stage_layers" in words)
    split = any(name in written for written, _ in ways for name in ("zbv", "dualpipev", "zero_bubble"))
    assert split == (not words.startswith(("activations", "compile")))  # what does not go with these is not told
    v_shaped = [written for written, _ in ways if "zbv" in written or "dualpipev" in written]
    assert not v_shaped or torch.__version__ >= "2.15"  # 2.11 cannot run them here


def test_the_expected_and_the_measured_bubble(runs: Runs) -> None:
    """4 micro-batches in 2 stages: 1/5 with stages of equal cost, more with the head in one of them."""
    said = runs.finish("bubble", "parallel.pp=2 evals=none checkpoint.every=0 model.layers=4", ranks=2)
    (expected,) = re.findall(r"  bubble: (\d\d\.\d)% of the time, 1f1b with 4 micro-batches; less with ", said)
    assert 20.0 <= float(expected) < 40.0
    measured = [line["bubble_share"] for line in read_lines(runs.folder("bubble") / "metrics.jsonl")]
    assert len(measured) == 12 and all(0 < share < 1 for share in measured)
