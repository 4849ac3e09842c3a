"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, 2.2): the model also learns to predict tokens further on."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.embedding import Embedding
from models.head import IGNORED, Reduction
from models.moe import WholeSequences
from models.norm import norm_of
from models.roles import Role, Spec, specify

Head = Callable[[Tensor, Tensor, Reduction], Tensor]


class MultiToken(nn.Module):
    """One step after the other, each for the token after the one that the step before predicts. Embedding and head are
    the model's; `embed` is a second name of it, since the last stage of a pipeline has no other."""

    def __init__(self, config: ModelConfig, blocks: Iterable[nn.Module]) -> None:
        """blocks: one of each step."""
        super().__init__()
        self.weight = config.mtp_weight / config.mtp
        self.embed = Embedding(config)
        self.steps = nn.ModuleDict({str(number): Further(config, block) for number, block in enumerate(blocks)})
        self.sequences: WholeSequences = WholeSequences()

    def forward(
        self, x: Tensor, tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, head: Head
    ) -> Tensor:
        """x: [batch, seq, dim], from which the head predicts labels; documents: [batch, seq] of whole sequences.
        Returns the summed loss times its weight, shape (1,). What lies beyond the sequence or a document is not
        predicted."""
        tokens, labels = self.sequences.whole(tokens), self.sequences.whole(labels)
        losses = []
        for number, step in enumerate(self.steps.values(), 1):
            x = step(x, self.embed(self.sequences.own(later(tokens, number, 0)), None), positions, documents)
            predicted = later(labels, number, IGNORED)
            if documents is not None:
                predicted = predicted.masked_fill(later(documents, number, -1) != documents, IGNORED)
            losses.append(head(x, self.sequences.own(predicted), "sum"))
        return self.weight * torch.stack(losses).sum(0)


class Further(nn.Module):
    """A step: of each token what the step before gave of it, joined with the embedding of a token further on, through a
    block."""

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        self.token_norm, self.stream_norm = norm_of(config), norm_of(config)
        self.join = Join(2 * config.dim, config.dim, bias=False)
        specify(self.join, weight=Spec(Role.matrix, config.init_std))
        self.block = block
        self.norm = norm_of(config)

    def forward(self, x: Tensor, vectors: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """x, vectors: [batch, seq, dim]. Returns the same shape, normalized."""
        x = self.join(self.token_norm(vectors), self.stream_norm(x))
        found: Tensor = self.norm(self.block(x, positions=positions, documents=documents, values=None))
        return found


class Join(nn.Linear):
    """A product with two vectors of each token, one behind the other."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(torch.cat([first, second], dim=-1), self.weight)


def later(values: Tensor, number: int, fill: int) -> Tensor:
    """values: [batch, seq]. Of each place the value so many places on; `fill` where there is none."""
    moved = values[:, number:]
    return F.pad(moved, (0, values.shape[1] - moved.shape[1]), value=fill)
