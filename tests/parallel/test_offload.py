"""What a Shelf takes for a parameter."""

from typing import Any

import torch
from torch import nn

from parallel.offload import Shelf, View

CPU = torch.device("cpu")


def test_a_parameter_that_becomes_whole_within_the_block_stays() -> None:
    """As FSDP2 does it with experts: its storage is empty before and after, and others lie there then."""
    block: Any = nn.Linear(8, 8, bias=False)
    shelf = Shelf(block, 0, None, CPU, None)
    activation = torch.randn(8, 8)
    kept = shelf.put(activation)
    block.weight = nn.Parameter(torch.randn(8, 8))
    assert not isinstance(shelf.put(block.weight), View)
    before = block.weight.detach()
    block.weight = nn.Parameter(torch.randn(8, 8))
    assert isinstance(shelf.put(before), View)  # no parameter any more
    shelf.let_go()
    assert torch.equal(shelf.take(kept), activation)
