"""Text written by the model."""

import math
from collections.abc import Callable, Sequence

import torch

WIDTH_MULTIPLE = 64  # tokens are padded to a multiple of this, so that the model sees few shapes


def generate(
    forward_logits: Callable[[torch.Tensor], torch.Tensor],
    prompt: Sequence[int],
    count: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device | str = "cpu",
    parts: int = 1,
) -> list[int]:
    """`count` tokens that follow `prompt`, drawn from softmax(logits / temperature); temperature 0 takes the likeliest.

    `prompt` has at least one token; end-of-text begins a new text. `forward_logits` gets the newest `context` tokens,
    int64 [1, width], padded on the right, and gives logits [1, width, vocabulary]. `parts`, a divisor of `context`,
    divides each width.
    Every rank calls this in step: the shapes are the same even if rounding makes choices differ, and the random numbers
    are its own, from the same seed. Rank 0's result is the one to show.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    multiple = math.lcm(WIDTH_MULTIPLE, parts)
    with torch.no_grad():
        for _ in range(count):
            window = tokens[-context:]
            width = min(-(-len(window) // multiple) * multiple, context)
            padded = torch.tensor([window + [window[-1]] * (width - len(window))], device=device)
            logits = forward_logits(padded)[0, len(window) - 1].double().cpu()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                shares = torch.softmax(logits / temperature, dim=0)
                tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
    return tokens[len(prompt) :]
