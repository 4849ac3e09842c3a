"""How many parameters a model has and how many operations a token costs. No torch here, unless a part is the
user's own."""

import math
from dataclasses import replace

from models.config import ModelConfig
from models.parts import part_flops
from models.shapes import is_learned, is_table, parameter_shapes


def _known_vocabulary(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not known before the tokenizer is")
    return config.vocab_size


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, without the vocabulary's padding and a tied head once. What routers count is none."""
    shapes = parameter_shapes(replace(config, vocab_multiple=1))
    return sum(math.prod(shape) for name, shape in shapes.items() if is_learned(name))


def active_parameters(config: ModelConfig) -> int:
    """Those that a token meets: of the experts of a block top_k and the shared ones."""
    idle = config.moe.experts - config.moe.top_k
    each = (2 + config.gated) * config.dim * config.expert_dim
    return parameters(config) - sum(map(config.routed, config.all_blocks)) * idle * each


def _attention_weights(config: ModelConfig) -> int:
    """Of the matrices of attention."""
    dim, latent, values = config.dim, config.latent, config.heads * config.value_size
    if latent.kv_rank == 0:
        return 2 * dim * (config.query_dim + config.key_value_dim)
    q = dim * config.query_dim if latent.q_rank is None else latent.q_rank * (dim + config.query_dim)
    kv = dim * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * (config.heads * latent.nope_dim + values)
    return q + kv + dim * values


def embedding_parameters(config: ModelConfig) -> int:
    """Of the tables over the vocabulary and over positions, the head among them, a tied one once: what published
    "non-embedding" sizes leave out (Kaplan et al. 2020; Pythia, Qwen)."""
    shapes = parameter_shapes(replace(config, vocab_multiple=1))
    return sum(math.prod(shape) for name, shape in shapes.items() if is_table(name))


def block_flops_per_token(config: ModelConfig, sequence_length: int, layer: int) -> tuple[float, float, float]:
    """Floating-point operations of one block's forward for one token: of all its matrix products, of attention over
    the whole square, and of the product at its end, which is among the first and whose result no gradient needs.

    With experts: the router, top_k experts and the shared ones. What experts give is needed for the gradient of their
    weights; what the shared ones give is not. Of a user's own part what torch counts, nothing where it cannot, and no
    product is known to be its last."""
    weights, scores = _attention_flops(config, sequence_length, layer)
    of_part, last = _feedforward_flops(config, sequence_length, layer)
    return weights + of_part, scores, last


def _attention_flops(config: ModelConfig, sequence_length: int, layer: int) -> tuple[float, float]:
    if "attention" in config.parts:
        return part_flops(config, "attention", layer, sequence_length) or (0.0, 0.0)
    square = config.query_dim + config.heads * config.value_size
    return 2.0 * _attention_weights(config), 2.0 * square * sequence_length


def _feedforward_flops(config: ModelConfig, sequence_length: int, layer: int) -> tuple[float, float]:
    """Of all products, and of the last of them."""
    dim, moe, matrices = config.dim, config.moe, 2 + config.gated
    if config.routed(layer):
        last = dim * moe.shared * config.expert_dim
        weights = dim * moe.experts + matrices * (dim * moe.top_k * config.expert_dim + last)
    elif "feedforward" in config.parts:
        return sum(part_flops(config, "feedforward", layer, sequence_length) or (0.0,)), 0.0
    else:
        last = dim * config.feedforward_dim
        weights = matrices * last
    return 2.0 * weights, 2.0 * last


def head_flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations of the head's forward for one token."""
    return 2.0 * _known_vocabulary(config) * config.dim


def end_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of all behind the last layer for one token: the head, and for each further token that
    is predicted a product of two vectors, a block and the head again."""
    head = head_flops_per_token(config)
    further = 0.0
    for layer in config.all_blocks[config.layers :]:
        further += 4.0 * config.dim**2 + sum(block_flops_per_token(config, sequence_length, layer)[:2]) + head
    return head + further


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward for one token of training.

    The sum of 6 for each weight of a matrix product it meets (the head is one, tied or not; looking up a vector is
    none; of experts the router, top_k and the shared ones) and 12 x layers x heads x head_dim x sequence_length for
    attention over the whole square (Chowdhery et al. 2022, PaLM, appendix B; nanoGPT counts norms, biases and padding
    too, 0.1 % more for GPT-2 124M). Neither causality nor a window is deducted and recomputation not added, so MFU,
    which counts these, depends neither on the kernel nor on activation memory. Softmax, norms, activations, biases and
    the optimizer are left out.
    """
    blocks = sum(sum(block_flops_per_token(config, sequence_length, layer)[:2]) for layer in range(config.layers))
    return 3.0 * (blocks + end_flops_per_token(config, sequence_length))


def seen_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """`flops_per_token` with attention only to the tokens that are seen, by causality and by windows when they have
    grown: for each block the mean number of them in place of sequence_length. Borders of documents are not deducted."""
    unseen = 0.0
    for layer in config.all_blocks:
        share = tokens_seen(sequence_length, config.window_of(layer)) / sequence_length
        unseen += block_flops_per_token(config, sequence_length, layer)[1] * (1 - share)
    return flops_per_token(config, sequence_length) - 3.0 * unseen


def tokens_seen(sequence_length: int, window: int | None) -> float:
    """How many tokens one attends to, itself among them: 1, 2, ... up to the window, then so many; their mean."""
    most = sequence_length if window is None else min(window, sequence_length)
    return most * (most + 1) / 2 / sequence_length + most * (sequence_length - most) / sequence_length
