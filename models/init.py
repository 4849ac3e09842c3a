"""First values of parameters, the same on every layout."""

import torch
from torch import Tensor

from models.derive import derive
from models.roles import Spec

BLOCK_ROWS = 1024


def initial_rows(
    spec: Spec, name: str, shape: torch.Size, seed: int, device: torch.device, start: int = 0, stop: int | None = None
) -> Tensor:
    """Rows [start, stop) of the parameter `name` of the whole, unpadded model, in float32.

    A parameter is drawn in blocks of dimension 0, an expert or 1,024 rows, each from a generator seeded by (seed, name,
    block), so that a rank draws only the blocks that it holds and neither the layout nor padding changes a value.
    """
    each = 1 if len(shape) > 2 else BLOCK_ROWS
    stop = shape[0] if stop is None else stop
    values = torch.full((stop - start, *shape[1:]), spec.mean, device=device)
    drawn = shape[0] if spec.rows is None else spec.rows
    end = min(stop, drawn)
    if spec.std > 0 and start < end:
        for block in range(start // each, -(-end // each)):
            first, last = block * each, min((block + 1) * each, drawn)
            generator = torch.Generator(device).manual_seed(derive(seed, name, block))
            rows = torch.randn(last - first, *shape[1:], generator=generator, device=device) * spec.std + spec.mean
            low, high = max(first, start), min(last, end)
            values[low - start : high - start] = rows[low - first : high - first]
    values[max(drawn - start, 0) :] = 0
    return values
