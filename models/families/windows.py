"""Windows of attention in config.json: `layer_types`, a word for each block."""

from collections.abc import Sequence
from typing import Any

from models.config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(config: ModelConfig) -> list[str]:
    return [FULL if config.window_of(layer) is None else SLIDING for layer in range(config.layers)]


def windows_of(types: Sequence[str], window: int | None) -> dict[str, Any]:
    """Keys of ModelConfig. Raises ValueError for what is not every n-th block with attention to all."""
    if SLIDING not in types and set(types) <= {FULL}:
        return {"window": None}
    every = types.index(FULL) + 1 if FULL in types else 0
    regular = [FULL if every and (layer + 1) % every == 0 else SLIDING for layer in range(len(types))]
    if list(types) != regular or window is None:
        raise ValueError(
            f"layer_types={list(types)} with sliding_window={window}: in Espalier all blocks have a window, or all but "
            "every n-th"
        )
    return {"window": window, "full_every": every}
