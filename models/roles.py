"""What each parameter is for. Decay, precision and initialization read it here; nothing matches names."""

from dataclasses import dataclass
from enum import Enum

from torch import nn


class Role(Enum):
    embedding = "embedding"
    matrix = "matrix"
    head = "head"
    norm = "norm"
    bias = "bias"
    scalar = "scalar"
    router = "router"
    balance = "balance"


# In the masters' dtype in whatever precision the others compute.
FULL_PRECISION = (Role.router, Role.balance)
# Set by models.moe.balance; no optimizer, norm or clipping sees them.
NOT_LEARNED = (Role.balance,)


@dataclass(frozen=True)
class Spec:
    """A parameter's role and its first value: normal with `mean` and `std`, or the constant `mean` where std is 0.
    `rows`: as many rows are drawn, those below are padding and stay 0; None: all."""

    role: Role
    std: float = 0.0
    mean: float = 0.0
    rows: int | None = None


def specify(module: nn.Module, **specs: Spec) -> nn.Module:
    """States, where a module is made, what each of its own parameters is. Returns the module."""
    object.__setattr__(module, "parameter_specs", specs)
    return module


def parameter_specs(model: nn.Module) -> dict[str, Spec]:
    """The spec of every parameter by its full name, a shared one once. Raises LookupError for one made without."""
    specs: dict[str, Spec] = {}
    for name, _ in model.named_parameters():
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        spec = getattr(module, "parameter_specs", {}).get(own_name)
        if spec is None:
            raise LookupError(f"parameter {name} of {type(module).__name__} was made without a role: use specify()")
        specs[name] = spec
    return specs


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    return {name: spec.role for name, spec in parameter_specs(model).items()}
