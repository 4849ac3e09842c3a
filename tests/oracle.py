"""What every layout must equal: the training of oracle_model's decoder, written out in plain PyTorch on one process.

It shares no code with models/, parallel/ or training/, and does everything in the plainest way: the whole global batch
at once, attention as matrix products with a mask, one mean over all predicted tokens, one clip, one step of
torch.optim.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle_model import Shape, Weights, logits, parameter_shapes


@dataclass(frozen=True)
class Batch:
    """tokens, labels: int64 [sequences, seq]; labels of -100 are not predicted."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Recipe:
    """optimizer: adamw, or sgd whose momentum is beta1."""

    optimizer: str
    lrs: tuple[float, ...]
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float | None


@dataclass
class Trajectory:
    """One entry a step; gradients are those before clipping, token_losses those of the weights before the step. The
    gradient of a router's load is the number of tokens of the step.

    margin: the smallest by which an expert was preferred to one that was not chosen."""

    initial: Weights
    losses: list[float]
    predicted: list[int]
    norms: list[float]
    gradients: list[Weights]
    token_losses: list[Tensor]
    final: Weights
    margin: float = math.inf


# What the numbers of a weighted sum begin with.
MIXES = {"x": 1.0, "x0": 0.0, "skip": 1.0, "own": 0.5, "embedding": 0.5}


def initial_weights(shape: Shape, seed: int, dtype: torch.dtype) -> Weights:
    """Normal with the shape's std, into the residual stream GPT-2's share of it; biases 0, norms 1. Each parameter is
    drawn in float32 in blocks of 1,024 rows, or of one expert, from a generator seeded by the hash of
    (seed, name, block)."""
    into_stream = {"scaled": shape.std / math.sqrt(2 * shape.layers), "same": shape.std, "zero": 0.0}
    weights = {}
    for name, size in parameter_shapes(shape).items():
        if name.endswith(("bias", ".load", ".dropped")):
            values = torch.zeros(size)
        elif "norm" in name:
            values = torch.ones(size)
        elif ".mix." in name:
            values = torch.full(size, MIXES[name.rpartition(".")[2]])
        else:
            std = shape.std
            if name.startswith(("embed.tokens.", "values.")) and shape.embedding_std is not None:
                std = shape.embedding_std
            elif "attention.out." in name or ".down" in name:
                std = into_stream[shape.residual]
            if name.startswith("blocks."):  # matrices: 1 / fan-in; a router, whose outputs are few: its square
                std = std / (shape.mup_width if ".router." in name else math.sqrt(shape.mup_width))
            blocks, each = [], 1 if len(size) == 3 else 1024
            for block, first in enumerate(range(0, size[0], each)):
                generator = torch.Generator().manual_seed(_hash(seed, name, block))
                blocks.append(torch.randn(min(each, size[0] - first), *size[1:], generator=generator) * std)
            values = torch.cat(blocks)
        weights[name] = values.to(dtype)
    return weights


def _hash(seed: int, name: str, block: int) -> int:
    """63 bits of blake2b over the parts with their types."""
    text = f"int:{seed}\x1fstr:{name}\x1fint:{block}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


BALANCE = (".router.load", ".router.bias", ".router.dropped")  # set by counts, not learned


def train(shape: Shape, seed: int, dtype: torch.dtype, batches: list[Batch], recipe: Recipe) -> Trajectory:
    """One step a batch, the loss a mean over all its predicted tokens."""
    initial = initial_weights(shape, seed, dtype)
    weights = {name: value.clone() for name, value in initial.items()}
    learned = {name: value.requires_grad_() for name, value in weights.items() if not name.endswith(BALANCE)}
    optimizer = _optimizer(learned, recipe, shape.mup_width)
    found = Trajectory(initial, [], [], [], [], [], {})
    for batch, lr in zip(batches, recipe.lrs, strict=True):
        scores, routing = logits(weights, shape, batch.tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten())  # the mean over labels that are not -100
        predicted = batch.labels != -100
        squares = torch.where(predicted, scores.logsumexp(-1) ** 2, 0)
        optimizer.zero_grad()
        (loss + (shape.z_loss * squares.sum() + routing.loss) / predicted.sum()).backward()
        gradients = {name: _gradient(value).clone() for name, value in learned.items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        if recipe.clip is not None and norm > recipe.clip:
            for value in learned.values():
                _gradient(value).mul_(recipe.clip / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr / group["width"]
        optimizer.step()
        for router, counts in routing.counts.items():
            assert shape.experts is not None
            weights[f"{router}.load"] = gradients[f"{router}.load"] = counts
            even = batch.tokens.numel() * shape.experts.top_k / shape.experts.number
            weights[f"{router}.bias"] += shape.experts.bias_rate * torch.sign(even - counts)
        found.margin = min(found.margin, routing.margin)
        found.losses.append(loss.item())
        found.predicted.append(int((batch.labels != -100).sum()))
        found.norms.append(norm)
        found.gradients.append(gradients)
        found.token_losses.append(token_losses(scores.detach(), batch.labels))
    found.final = {name: value.detach() for name, value in weights.items()}
    return found


def token_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Each token's loss, 0 where it is not predicted."""
    predicted = labels != -100
    picked = scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(predicted, scores.logsumexp(-1) - picked, 0)


def _optimizer(weights: Weights, recipe: Recipe, width: float) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not. Matrices of blocks learn at a rate divided by the width, and decay as much."""
    matrices = {name: value for name, value in weights.items() if value.ndim >= 2}
    hidden = [value for name, value in matrices.items() if name.startswith("blocks.")]
    tables = [value for name, value in matrices.items() if not name.startswith("blocks.")]
    groups = [
        {"params": hidden, "weight_decay": recipe.weight_decay * width, "width": width},
        {"params": tables, "weight_decay": recipe.weight_decay, "width": 1.0},
        {"params": [value for value in weights.values() if value.ndim == 1], "weight_decay": 0.0, "width": 1.0},
    ]
    if recipe.optimizer == "adamw":
        betas = (recipe.beta1, recipe.beta2)
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=recipe.eps, foreach=False, fused=False)
    return torch.optim.SGD(groups, lr=0.0, momentum=recipe.beta1, foreach=False, fused=False)


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad
