"""Memory and first values for a model that was built on the meta device."""

import torch
from torch import nn

from models.decoder import Decoder
from models.init import initial_rows
from models.moe import routers
from models.position import Rotation
from models.roles import parameter_specs
from parallel.local import is_sharded, local, local_region


@torch.no_grad()
def materialize(model: Decoder, seed: int, device: torch.device, storage: torch.device | None = None) -> None:
    """Gives every parameter memory and its first values, drawn on `device` and only for the rows this rank holds. They
    are the same on every layout. `storage`: where parameters live, if not on `device` (offloaded)."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        model.to_empty(device=storage or device)
        model.tie()
    for router in routers(model):
        router.share = torch.zeros((), dtype=router.weight.dtype, device=device)
    for module in model.modules():
        if isinstance(module, Rotation):
            module.speeds = module.speeds.to(device)
    for name, spec in parameter_specs(model).items():
        parameter = model.get_parameter(name)
        rows, *others = local_region(parameter)
        values = initial_rows(spec, model.copies.get(name, name), parameter.shape, seed, device, *rows).to(
            parameter.dtype
        )
        for dimension, (start, stop) in enumerate(others, 1):
            values = values.narrow(dimension, start, stop - start)
        if is_sharded(parameter):
            local(parameter).copy_(values)
        else:
            path, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(path), own_name, nn.Parameter(values, parameter.requires_grad))
    model.tie()
