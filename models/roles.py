"""What each parameter is for. Decay, precision and initialization read it here; nothing matches names."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from torch import nn

from models.config import ModelConfig

if TYPE_CHECKING:
    from models.decoder import Decoder


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
    `rows`: as many rows are drawn, those below are padding and stay 0; None: all. Where it is stated `std` is that of
    the standard parametrization."""

    role: Role
    std: float = 0.0
    mean: float = 0.0
    rows: int | None = None


@dataclass(frozen=True)
class Scaling:
    """What a role's std and learning rate are multiplied by."""

    std: float = 1.0
    lr: float = 1.0


def scaling(config: ModelConfig, role: Role) -> Scaling:
    """The maximal update parametrization (Yang et al. 2022, Tensor Programs V) in the form of its table 8 for Adam, in
    which a tied head is one parameter with the embedding. Of a matrix both sides grow with the width, of a router its
    inputs. Embeddings, norms and biases are left, and the scores of a head are divided by the width (models.head)."""
    width = config.width
    if role is Role.matrix:
        return Scaling(width**-0.5, 1 / width)
    return Scaling(1 / width, 1 / width) if role is Role.router else Scaling()


def specify(module: nn.Module, **specs: Spec) -> nn.Module:
    """States, where a module is made, what each of its own parameters is. Returns the module."""
    object.__setattr__(module, "parameter_specs", specs)
    return module


def parameter_specs(model: "Decoder") -> dict[str, Spec]:
    """The spec of every parameter by its full name, with the std of the model's parametrization. Raises as _stated."""
    stated = _stated(model)
    shares = {name: scaling(model.config, spec.role).std for name, spec in stated.items()}
    return {name: replace(spec, std=spec.std * shares[name]) for name, spec in stated.items()}


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    return {name: spec.role for name, spec in _stated(model).items()}


def _stated(model: nn.Module) -> dict[str, Spec]:
    """Specs as they were given to specify(), of a shared parameter once. Raises LookupError for one made without."""
    specs: dict[str, Spec] = {}
    for name, _ in model.named_parameters():
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        spec = getattr(module, "parameter_specs", {}).get(own_name)
        if spec is None:
            raise LookupError(f"parameter {name} of {type(module).__name__} was made without a role: use specify()")
        specs[name] = spec
    return specs
