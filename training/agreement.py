"""debug=paranoid: in each step, whatever several ranks hold is compared bit by bit."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from parallel.local import local
from parallel.replicas import differing, refuse
from training.optimizers.base import Optimizer


class Agreement:
    """Compares gradients, parameters, tied weights and optimizer state over all ranks. A check is a collective, and
    raises ReplicasDiffer on all ranks alike, but for what only one rank has twice."""

    def __init__(self, model: Decoder, mesh: DeviceMesh | None, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.several = mesh is not None and mesh.size() > 1
        # Those of the start: a weight that came untied is one more. The copy that another stage of a pipeline has of a
        # parameter is compared under its name.
        self.parameters = dict(model.named_parameters())

    def check_gradients(self) -> None:
        """To be called when they are summed over ranks and not yet clipped. None counts as zero."""
        self._check(
            {
                f"gradient of {self._name(name)}": torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad
                for name, parameter in self.parameters.items()
            }
        )
        refuse(self._parted("gradient of", {name: p.grad for name, p in self.parameters.items() if p.grad is not None}))

    def check_state(self) -> None:
        """To be called after the update."""
        parameters: dict[str, Tensor] = {
            f"parameter {self._name(name)}": value for name, value in self.parameters.items()
        }
        state = {f"optimizer state {self._name(name)}": value for name, value in self.optimizer.tensors().items()}
        tied = self._tied()
        self._check(parameters | tied | state)
        refuse({name: "is tied on no rank" for name, one in tied.items() if not one})
        refuse(self._parted("parameter", self.parameters))

    def _parted(self, what: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Copies that are on one rank with what they are copies of, two stages of a pipeline, and have other bits."""
        pairs = [(copy, owner) for copy, owner in self.model.copies.items() if copy in tensors and owner in tensors]
        return {
            f"{what} {copy}": f"differs from {owner} on the same rank"
            for copy, owner in pairs
            if not torch.equal(local(tensors[copy]), local(tensors[owner]))
        }

    def _name(self, name: str) -> str:
        """Of the owner, for a copy and for state of it."""
        for copy, owner in self.model.copies.items():
            if name == copy or name.startswith(f"{copy}."):
                return owner + name.removeprefix(copy)
        return name

    def _check(self, tensors: dict[str, Tensor]) -> None:
        if self.several:
            refuse(differing(tensors))

    def _tied(self) -> dict[str, Tensor]:
        """Whether each weight that is used twice is one parameter."""
        return {
            f"tied weight {second}": torch.tensor(
                self.model.get_parameter(second) is self.parameters[first], device=self.parameters[first].device
            )
            for second, first in self.model.ties.items()
        }
