"""Parameters have values that they can have: after initialization those that were declared, after loading any but none
at all."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.roles import NOT_LEARNED, Spec, parameter_specs
from parallel.local import local, local_region
from parallel.mesh import sum_over

SIGMAS = 6.0  # by so many standard errors a drawn mean or deviation may be off
ROUNDING = 0.01  # of the deviation, beside that
SHOWN = 10


class WrongValues(Exception):
    """Parameters hold what neither initialization nor training gives."""


@torch.no_grad()
def check_values(model: Decoder, mesh: DeviceMesh | None, loaded_from: str | None = None) -> None:
    """loaded_from: a checkpoint; None: as initialized, each with the mean and the deviation of its Spec. A collective;
    raises WrongValues on every rank, which names the parameters of its stage."""
    specs = parameter_specs(model)
    found = [_sums(model.get_parameter(name), spec) for name, spec in specs.items()]
    # offloaded ones are on the CPU, all but routers' then
    sums = torch.stack(found if mesh is None else [of_one.to(mesh.device_type) for of_one in found])
    sum_over(mesh, ("dp_replicate", "dp_shard", "tp"), sums)  # copies count as often as there are: so do their sizes
    wrong = [
        f"  {name} {told}"
        for (name, spec), (number, total, squares) in zip(specs.items(), sums.tolist(), strict=True)
        if (told := _wrong(spec, number, total, squares, _drawn(model.get_parameter(name), spec), loaded_from is None))
    ]
    of_stages = sum_over(mesh, ("pp",), torch.tensor(len(wrong), device=sums.device))
    if of_stages > 0:
        more = [f"  and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        shown = wrong[:SHOWN] + more or ["  those of another stage of the pipeline"]
        when = "initialized" if loaded_from is None else f"loaded from {loaded_from}"
        raise WrongValues("\n".join([f"parameters as {when}:", *shown]))


def _sums(parameter: nn.Parameter, spec: Spec) -> Tensor:
    """float64 [3]: number, sum and sum of squares of the values here that are drawn, not padding."""
    (start, _), *_ = local_region(parameter)
    values = local(parameter)
    if spec.rows is not None:
        values = values[: max(spec.rows - start, 0)]
    number = torch.tensor(values.numel(), dtype=torch.float64, device=values.device)
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return torch.stack([number, values.sum(dtype=torch.float64), norm.square()])


def _drawn(parameter: nn.Parameter, spec: Spec) -> int:
    """How many values were drawn for the whole of it: copies tell nothing more about the draw."""
    rows, *others = parameter.shape
    return math.prod([rows if spec.rows is None else min(rows, spec.rows), *others])


def _wrong(spec: Spec, number: float, total: float, squares: float, drawn: int, fresh: bool) -> str:
    """What is wrong with a parameter; nothing where all is right."""
    if number == 0:
        return ""
    if not math.isfinite(squares):
        return "has values that are not finite"
    varies = spec.std > 0 or spec.mean != 0
    if squares == 0 and varies:
        return "is 0 everywhere"
    if not fresh or spec.role in NOT_LEARNED:
        return ""
    mean = total / number
    deviation = math.sqrt(max(squares / number - mean**2, 0.0))
    if abs(mean - spec.mean) > spec.std * SIGMAS / math.sqrt(drawn) + 1e-6:
        return f"has a mean of {mean:.3g}, declared is {spec.mean:.3g}"
    if abs(deviation - spec.std) > spec.std * (SIGMAS / math.sqrt(2 * drawn) + ROUNDING) + 1e-3 * abs(spec.mean):
        return f"has a standard deviation of {deviation:.3g}, declared is {spec.std:.3g}"
    return ""
