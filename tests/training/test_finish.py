"""What a finished run shows."""

from typing import cast

import torch
from torch import Tensor, nn

from parallel.apply import Spread
from training.config import Config
from training.finish import sample
from training.tokenizers import Bytes


class Likes:
    """A model of 300 tokens that wants the one the tokenizer lacks, and next to it an "a"."""

    model = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 300)
        logits[..., 299], logits[..., ord("a")] = 1000.0, 500.0
        return logits


def test_a_sample_has_only_tokens_of_the_tokenizer() -> None:
    config = Config()
    config.metrics.sample_tokens, config.metrics.sample_prompt = 5, "b"
    written = sample(config, cast(Spread, Likes()), Bytes(), torch.device("cpu"))
    assert written == "baaaaa"
