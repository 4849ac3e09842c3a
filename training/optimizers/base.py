"""What every optimizer here is. They work on each rank's own shards through torch's functional optimizers: an object of
torch.optim imports the compiler, which costs seconds at the start of a run, and cannot skip a step without reading the
device."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from parallel.local import local
from training.optimizers.groups import Group


class Optimizer(ABC):
    """State lies beside each parameter, by its name and at its global shape, and is there from the start."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.state: dict[str, dict[str, Tensor]] = {
            name: self.first_state(parameter) for group in groups for name, parameter in group.parameters.items()
        }

    @abstractmethod
    def first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """State of one parameter before the first step."""

    @abstractmethod
    def update(self, group: Group, lr: float, skip: Tensor) -> None:
        """One step of a group. `skip`: a scalar on the device; where it is 1 nothing changes."""

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor) -> None:
        for group in self.groups:
            self.update(group, lr * group.lr_share, skip)

    def tensors(self) -> dict[str, Tensor]:
        """All state as one flat dict, to save or to load into."""
        return {f"{name}.{key}": value for name, state in self.state.items() for key, value in state.items()}

    def _locals(self, group: Group, key: str) -> list[Tensor]:
        return [local(self.state[name][key]) for name in self._with_gradient(group)]

    def _with_gradient(self, group: Group) -> list[str]:
        return [name for name, parameter in group.parameters.items() if parameter.grad is not None]

    def _values(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """Local shards of parameters and of their gradients."""
        parameters = [group.parameters[name] for name in self._with_gradient(group)]
        return [local(p) for p in parameters], [local(p.grad) for p in parameters if p.grad is not None]
