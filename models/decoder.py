"""The one decoder. Families are configs of it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import Attention
from models.config import ModelConfig, NormPlace
from models.embedding import Embedding, ValueEmbedding
from models.feedforward import FeedForward
from models.head import Head, Reduction
from models.latent import LatentAttention
from models.mix import Mix
from models.moe import MoE
from models.multitoken import MultiToken
from models.norm import norm_of
from models.parts import own_part

Ends = tuple[bool, bool]  # the embedding; norm and head
Stream = tuple[Tensor, ...]  # what goes from block to block, each [batch, seq, dim]: x, x0, the open skips
Values = Sequence[Tensor | None]  # of each block what its value embedding gives


class Block(nn.Module):
    """Attention, and a feed-forward layer or experts, each normalized (before, after or both) and added to the residual
    stream, which may begin as a mix of what the block before gave, what the embedding gave, and a skip."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.takes_x0 = config.x0
        self.takes_skip, self.leaves_skip = config.takes_skip(layer), config.leaves_skip(layer)
        mixed = {"x": 1.0} | ({"x0": 0.0} if self.takes_x0 else {}) | ({"skip": 1.0} if self.takes_skip else {})
        self.mix = Mix(**mixed) if len(mixed) > 1 else None
        before, after = config.norm_place is not NormPlace.after, config.norm_place is not NormPlace.before
        self.attention_norm = norm_of(config) if before else None
        ours = LatentAttention if config.latent.kv_rank > 0 else Attention
        own = own_part(config, "attention", layer)
        self.attention = ours(config, layer) if own is None else own
        self.attention_post_norm = norm_of(config) if after else None
        self.feedforward_norm = norm_of(config) if before else None
        self.routed = config.routed(layer)
        own = MoE(config) if self.routed else own_part(config, "feedforward", layer)
        self.feedforward = FeedForward(config, config.feedforward_dim) if own is None else own
        self.feedforward_post_norm = norm_of(config) if after else None

    def forward(
        self, x: Tensor, *mixed: Tensor, positions: Tensor | None, documents: Tensor | None, values: Tensor | None
    ) -> Tensor:
        """x, and each of what is mixed into it: [batch, seq, dim]. Returns the same shape."""
        x, y = self.attend(x, *mixed, positions=positions, documents=documents, values=values)
        y = self.feedforward(y, documents) if self.routed else self.feedforward(y)
        return x + (y if self.feedforward_post_norm is None else self.feedforward_post_norm(y))

    def attend(
        self, x: Tensor, *mixed: Tensor, positions: Tensor | None, documents: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and what the feed-forward layer takes of it."""
        if self.mix is not None:
            x = self.mix(x, *mixed)
        y = x if self.attention_norm is None else self.attention_norm(x)
        y = self.attention(y, positions, documents, values)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        return x, x if self.feedforward_norm is None else self.feedforward_norm(x)


class Walk(nn.Module):
    """The way of the stream through the blocks, a child without parameters. What groups blocks, such as recomputation
    in segments, replaces it."""

    def forward(self, blocks: Sequence[Block], stream: Stream, values: Values, **inputs: Tensor | None) -> Stream:
        for block, vectors in zip(blocks, values, strict=True):
            stream = through(block, stream, values=vectors, **inputs)
        return stream


def through(block: Block, stream: Stream, **inputs: Tensor | None) -> Stream:
    """The stream after a block, which takes of it what it mixes and may leave a skip on it."""
    x, kept = stream[0], stream[1:]
    mixed = kept[:1] if block.takes_x0 else ()
    if block.takes_skip:
        mixed, kept = (*mixed, kept[-1]), kept[:-1]
    x = block(x, *mixed, **inputs)
    return (x, *kept, x) if block.leaves_skip else (x, *kept)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, and in training what predicts further tokens. A stage of a pipeline is the same
    class with the parts it does not hold set to None; blocks keep their index in the whole model as their name."""

    embed: Embedding | None
    norm: nn.Module | None
    head: Head | None
    mtp: MultiToken | None

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int] | None = None,
        parts: Ends = (True, True),
        shares: bool = True,
    ) -> None:
        """layers: the blocks it holds, all where None. parts: whether it holds the embedding, and norm and head.
        shares: whether parameters with two names are one; else the second is a copy of its own.

        `copies`: by the name of each such copy that of the first. They have the same values and count once."""
        super().__init__()
        self.config = config
        held = list(range(config.layers) if layers is None else layers)
        self.embed = Embedding(config) if parts[0] else None
        self.values = nn.ModuleDict(
            {str(layer): ValueEmbedding(config) for layer in held if config.value_table(layer) is not None}
        )
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in held})
        self.walk = Walk()
        self.norm = norm_of(config) if parts[1] else None
        self.head = Head(config) if parts[1] else None
        further = [Block(config, config.layers + number) for number in range(config.mtp if parts[1] else 0)]
        self.mtp = MultiToken(config, further) if further else None
        names = {name for name, _ in self.named_parameters()}
        shared = {second: first for second, first in config.shared_parameters.items() if second in names}
        self.ties = shared if shares else {}
        self.copies = {} if shares else shared
        if self.mtp is not None and config.tied_head:
            self.ties = self.ties | {"mtp.embed.tokens.weight": "head.weight"}
        self.tie()

    @property
    def blocks_by_layer(self) -> dict[int, Block]:
        """All it holds, those that predict further tokens behind the others."""
        further = [] if self.mtp is None else [step.block for step in self.mtp.steps.values()]
        blocks: dict[int, Any] = {int(layer): block for layer, block in self.blocks.items()}
        return blocks | {self.config.layers + number: block for number, block in enumerate(further)}

    def stage(self, layers: Iterable[int], parts: Ends) -> "Decoder":
        """A Decoder of some of the parts of this one: the modules are the same, so what becomes of them there becomes
        of them here."""
        with torch.device("meta"):
            stage = Decoder(self.config, (), (False, False))
        held = list(map(str, layers))
        stage.embed = self.embed if parts[0] else None
        stage.values = nn.ModuleDict({layer: self.values[layer] for layer in held if layer in self.values})
        stage.blocks = nn.ModuleDict({layer: self.blocks[layer] for layer in held})
        stage.norm, stage.head, stage.mtp = (self.norm, self.head, self.mtp) if parts[1] else (None, None, None)
        return stage

    def tie(self) -> None:
        """Makes parameters with two names one. Those that are replaced must be tied again."""
        for second, first in self.ties.items():
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
        first (ModelConfig.stream_tensors says how many).
        Returns the stream, or on the last stage what Head returns: the summed loss of shape (1,) given labels, else
        logits."""
        if self.embed is not None:
            x = self.embed(tokens, positions)
            stream = (x, x) if self.config.x0 else (x,)
        values = [self.values[layer](tokens) if layer in self.values else None for layer in self.blocks]
        blocks = tuple(self.blocks.values())
        stream = self.walk(blocks, stream, values, positions=positions, documents=documents)
        if self.norm is None or self.head is None:
            # Not what blocks here use as well: torch.distributed.pipelining detaches in place what is handed on.
            return stream[0], *(kept.clone() for kept in stream[1:])
        x = self.norm(stream[0])
        found = self.head(x, labels, reduction)
        if labels is not None and reduction == "sum" and self.mtp is not None and self.mtp.training:
            further = self.mtp(x, tokens, labels, positions, documents, self.head)
            found = found + (further - further.detach())
        return found
