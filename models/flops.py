"""How many parameters a model has and how many operations a token costs. No torch here."""

import math
from dataclasses import replace

from models.config import ModelConfig
from models.shapes import parameter_shapes


def _known_vocabulary(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not known before the tokenizer is")
    return config.vocab_size


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, without the vocabulary's padding and a tied head once."""
    return sum(map(math.prod, parameter_shapes(replace(config, vocab_multiple=1)).values()))


def block_flops_per_token(config: ModelConfig, sequence_length: int) -> tuple[float, float, float]:
    """Floating-point operations of one block's forward for one token: of all its matrix products, of attention over
    the whole square, and of the last product alone, which is among the first."""
    dim, ffn = config.dim, config.feedforward_dim
    weights = 2 * dim * dim + 2 * dim * config.key_value_dim + 2 * dim * ffn
    return 2.0 * weights, 4.0 * config.dim * sequence_length, 2.0 * dim * ffn


def head_flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations of the head's forward for one token."""
    return 2.0 * _known_vocabulary(config) * config.dim


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward for one token of training.

    6 per weight of a matrix product (the head is one, tied or not; embeddings are not) and 12 x layers x dim x
    sequence_length for attention over the whole square (Chowdhery et al. 2022, PaLM, appendix B; nanoGPT counts
    norms, biases and padding too, 0.1 % more for GPT-2 124M). Causality is not deducted and recomputation not added,
    so MFU neither depends on the kernel nor on activation memory.
    """
    products, attention, _ = block_flops_per_token(config, sequence_length)
    return 3.0 * (config.layers * (products + attention) + head_flops_per_token(config))
