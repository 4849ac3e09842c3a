"""What a finished run shows."""

import shlex
from typing import Any, cast

import torch
from torch import Tensor, nn

from parallel.apply import Spread
from parallel.config import Scope
from training.config import Config
from training.finish import next_ways, sample
from training.folder import RunFolder
from training.tokenizers import Bytes


class Likes:
    """A model of 300 tokens that wants the one the tokenizer lacks, and next to it an "a"."""

    model, compiled = nn.Identity(), Scope.none

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 300)
        logits[..., 299], logits[..., ord("a")] = 1000.0, 500.0
        return logits


def test_a_sample_has_only_tokens_of_the_tokenizer() -> None:
    config = Config()
    config.metrics.sample_tokens, config.metrics.sample_prompt = 5, "b"
    written = sample(config, cast(Spread, Likes()), Bytes(), torch.device("cpu"))
    assert written == "baaaaa"


def score_words(**checkpoint: Any) -> list[str]:
    config = Config(steps=3, out="/runs of mine")
    for key, value in checkpoint.items():
        setattr(config.checkpoint, key, value)
    folder = RunFolder(config.out, "tiny", config.checkpoint.dir)
    said = next_ways(config, folder, "uv run train.py steps=3 name=tiny")
    return shlex.split(next(line for line in said.splitlines() if "score:" in line).partition("score:")[2])


def test_the_command_that_scores_again() -> None:
    start = ["uv", "run", "train.py", "eval_only=true"]
    assert score_words() == [*start, "checkpoint.load=/runs of mine/tiny", "out=/runs of mine"]
    there = "checkpoint.load=/their place/ck"
    assert score_words(dir="/their place/ck") == [*start, there, "out=/runs of mine", "name=tiny-scored"]
