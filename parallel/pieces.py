"""The pieces of a block whose experts are apart from it: all but the way to the experts and back, where sizes change
from step to step and FSDP2 gathers parameters."""

from collections.abc import Callable
from typing import Any

from torch import nn

from models.decoder import Block

Method = Callable[..., Any]


def replace_pieces(block: Block, replaced: Callable[[nn.Module, Method], Method]) -> None:
    """Puts in the place of each method what is made of its module and the method. No parameter changes its name."""
    for module, name in ((block, "attend"), (block.feedforward, "route"), (block.feedforward, "combine")):
        setattr(module, name, replaced(module, getattr(module, name)))
