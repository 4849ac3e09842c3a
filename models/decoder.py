"""The one decoder. Families are configs of it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from models.attention import Attention
from models.config import ModelConfig
from models.embedding import Embedding
from models.feedforward import FeedForward
from models.head import Head, Reduction
from models.roles import Role, Spec, specify

Ends = tuple[bool, bool]  # the embedding; norm and head
Stream = tuple[Tensor, ...]  # what goes from block to block: x [batch, seq, dim] first


def layer_norm(config: ModelConfig) -> nn.Module:
    norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
    return specify(norm, weight=Spec(Role.norm, mean=1.0), bias=Spec(Role.bias))


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = layer_norm(config)
        self.attention = Attention(config)
        self.feedforward_norm = layer_norm(config)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, *, positions: Tensor | None, documents: Tensor | None) -> Stream:
        x = x + self.attention(self.attention_norm(x), positions, documents)
        return (x + self.feedforward(self.feedforward_norm(x)),)


class Walk(nn.Module):
    """The way of the stream through the blocks, a child without parameters. What groups blocks, such as recomputation
    in segments, replaces it."""

    def forward(self, blocks: Sequence[nn.Module], stream: Stream, **inputs: Tensor | None) -> Stream:
        for block in blocks:
            stream = block(*stream, **inputs)
        return stream


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. A stage of a pipeline is the same class with the parts it does not hold set to
    None; blocks keep their index in the whole model as their name."""

    embed: Embedding | None
    norm: nn.Module | None
    head: Head | None

    def __init__(self, config: ModelConfig, layers: Iterable[int] | None = None, parts: Ends = (True, True)) -> None:
        """layers: the blocks it holds, all where None. parts: whether it holds the embedding, and norm and head.

        `copies`: parameters here that are another's of the whole model (a tied head without its embedding), and its
        name: they have the same values and count once."""
        super().__init__()
        self.config = config
        self.copies: dict[str, str] = {}
        self.embed = Embedding(config) if parts[0] else None
        held = range(config.layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in held})
        self.walk = Walk()
        self.norm = layer_norm(config) if parts[1] else None
        self.head = Head(config) if parts[1] else None
        self.tie()

    def stage(self, layers: Iterable[int], parts: Ends) -> "Decoder":
        """A Decoder of some of the parts of this one: the modules are the same, so what becomes of them there becomes
        of them here."""
        with torch.device("meta"):
            stage = Decoder(self.config, (), (False, False))
        stage.embed = self.embed if parts[0] else None
        stage.blocks = nn.ModuleDict({str(layer): self.blocks[str(layer)] for layer in layers})
        stage.norm, stage.head = (self.norm, self.head) if parts[1] else (None, None)
        return stage

    def ties(self) -> dict[str, str]:
        """Names of parameters that are another one: the head uses the embedding's weight where the config says so."""
        here = self.embed is not None and self.head is not None
        return {"head.weight": "embed.tokens.weight"} if self.config.tied_head and here else {}

    def tie(self) -> None:
        """Makes them one. Parameters that are replaced must be tied again."""
        for second, first in self.ties().items():
            path, _, name = second.rpartition(".")
            setattr(self.get_submodule(path), name, self.get_parameter(first))

    def forward(
        self,
        *stream: Tensor,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        reduction: Reduction = "sum",
    ) -> Tensor | Stream:
        """tokens, labels, positions, documents: [batch, seq]; `stream` is what the stage before sent, nothing on the
        first.
        Returns the stream, or on the last stage what Head returns: the summed loss of shape (1,) given labels, else
        logits."""
        if self.embed is not None:
            stream = (self.embed(tokens, positions),)
        stream = self.walk(tuple(self.blocks.values()), stream, positions=positions, documents=documents)
        if self.norm is None or self.head is None:
            return stream
        return self.head(self.norm(stream[0]), labels, reduction)
