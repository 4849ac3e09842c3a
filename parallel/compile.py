"""torch.compile per block or over the whole model. In place, so that no parameter changes its name."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from models.decoder import Block
from parallel.config import CompileConfig, Scope
from parallel.pieces import replace_pieces

DEFAULT_GRAPHS = 8  # torch's own recompile_limit
KINDS_OF_BLOCKS = 6  # with and without a skip and a value embedding; two pieces more where experts are apart


def compile_model(
    model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig, device: torch.device, apart: bool = False
) -> Scope:
    """Compiles in place, at first use. Blocks are alike, so one graph serves them all, or where experts are apart one
    each of their pieces. Returns the scope that `auto` stood for."""
    scope = config.scope
    if scope is Scope.auto:
        scope = Scope.block if device.type == "cuda" else Scope.none
    if scope is Scope.block:
        options: dict[str, Any] = {"fullgraph": True, "dynamic": config.dynamic}
        for block in blocks:
            if apart and isinstance(block, Block) and block.routed:
                replace_pieces(block, lambda _, method: torch.compile(method, **options))
            else:
                block.compile(**options)
    elif scope is Scope.model:
        model.compile(dynamic=config.dynamic)
    return scope


def as_written(scope: Scope) -> AbstractContextManager[None]:
    """Within it a compiled model computes as if it were not: for a few passes of a shape not worth a graph."""
    if scope is Scope.none:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def listen(started: Callable[[list[str]], None], ended: Callable[[], None]) -> None:
    """Has each compilation from now on begin with `started`, given why no graph there is fits (nothing for the first),
    and end with `ended`. Graphs and listeners that an earlier run left in this process are forgotten.

    Dynamo's callbacks and reasons are private, with no public counterpart; seen on torch 2.11 and 2.15."""
    torch.compiler.reset()
    from torch._dynamo.callback import on_compile_end, on_compile_start
    from torch._dynamo.utils import guard_failures

    def start(_: object) -> None:
        reasons = [reason for of_code in guard_failures.values() for reason in of_code]
        guard_failures.clear()
        started(reasons)

    guard_failures.clear()
    on_compile_start(start)
    on_compile_end(lambda _: ended())


def allow_graphs(shapes: int) -> None:
    """Lets a block's code be compiled for so many shapes, beside the graphs that torch allows by default, above which a
    block that is compiled whole is refused."""
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, DEFAULT_GRAPHS + KINDS_OF_BLOCKS * shapes)
