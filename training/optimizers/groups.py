"""Which parameters decay."""

from dataclasses import dataclass

from torch import nn

from models.decoder import Decoder
from models.roles import NOT_LEARNED, Role, parameter_roles

DECAYED = (Role.embedding, Role.matrix, Role.head, Role.router)


@dataclass
class Group:
    """Parameters by name that share a weight decay."""

    parameters: dict[str, nn.Parameter]
    weight_decay: float

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        return f"{len(self.parameters)} tensors, {count:,} values, weight decay {self.weight_decay:g}"


def decay_groups(model: Decoder, weight_decay: float) -> list[Group]:
    """Matrices and embeddings decay; norms and biases do not. Each that is learned is in exactly one group."""
    roles = parameter_roles(model)
    parameters = {name: value for name, value in model.named_parameters() if roles[name] not in NOT_LEARNED}
    decayed = {name: parameter for name, parameter in parameters.items() if roles[name] in DECAYED}
    rest = {name: parameter for name, parameter in parameters.items() if name not in decayed}
    return [Group(decayed, weight_decay), Group(rest, 0.0)]
