"""Stochastic gradient descent with momentum, torch's fused kernel."""

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from training.optimizers.base import Optimizer
from training.optimizers.groups import Group


class SGD(Optimizer):
    """As torch.optim.SGD: weight decay is added to the gradient."""

    def __init__(self, groups: list[Group], momentum: float) -> None:
        self.momentum = momentum
        super().__init__(groups)

    def first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if self.momentum else {}

    def update(self, group: Group, lr: float, skip: Tensor) -> None:
        parameters, gradients = self._values(group)
        momentum: list[Tensor | None] = [None] * len(parameters)
        if self.momentum:
            momentum = [*self._locals(group, "momentum")]
        sgd(
            parameters,
            gradients,
            momentum,
            fused=True,
            found_inf=skip,
            weight_decay=group.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
