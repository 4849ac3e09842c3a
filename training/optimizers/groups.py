"""Which parameters decay, and which learn more slowly."""

from dataclasses import dataclass

from torch import nn

from models.decoder import Decoder
from models.roles import NOT_LEARNED, Role, parameter_roles, scaling

DECAYED = (Role.embedding, Role.matrix, Role.head, Role.router)


@dataclass
class Group:
    """Parameters by name that share a weight decay and a learning rate, `lr_share` of the schedule's."""

    parameters: dict[str, nn.Parameter]
    weight_decay: float
    lr_share: float = 1.0

    def __str__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters.values())
        told = f"{len(self.parameters)} tensors, {count:,} values, weight decay {self.weight_decay:g}"
        return told if self.lr_share == 1 else f"{told}, learning rate x {self.lr_share:.3g}"


def decay_groups(model: Decoder, weight_decay: float) -> list[Group]:
    """Matrices and embeddings decay; norms and biases do not. Each that is learned is in exactly one group. The decay
    of a step, learning rate x weight decay, is the same whatever the share (as in Microsoft's package mup)."""
    roles = parameter_roles(model)
    parameters = {name: value for name, value in model.named_parameters() if roles[name] not in NOT_LEARNED}
    decayed = {name: parameter for name, parameter in parameters.items() if roles[name] in DECAYED}
    rest = {name: parameter for name, parameter in parameters.items() if name not in decayed}
    shares = {name: scaling(model.config, roles[name]).lr for name in decayed}
    groups = [
        Group({name: decayed[name] for name in decayed if shares[name] == share}, weight_decay / share, share)
        for share in sorted(set(shares.values()), reverse=True)
    ]
    return [*groups, Group(rest, 0.0)]
