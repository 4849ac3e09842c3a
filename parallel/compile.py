"""torch.compile per block or over the whole model. In place, so that no parameter changes its name."""

import torch
from torch import nn

from parallel.config import CompileConfig, Scope


def compile_model(model: nn.Module, config: CompileConfig, device: torch.device) -> Scope:
    """Compiles in place, at first use. Blocks are alike, so one graph serves them all. Returns the scope that `auto`
    stood for."""
    scope = config.scope
    if scope is Scope.auto:
        scope = Scope.block if device.type == "cuda" else Scope.none
    if scope is Scope.block:
        assert isinstance(model.blocks, nn.ModuleDict)
        for block in model.blocks.values():
            block.compile(fullgraph=True)
    elif scope is Scope.model:
        model.compile()
    return scope
