"""AdamW (Loshchilov and Hutter 2019), torch's fused kernel."""

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from parallel.local import local
from training.optimizers.base import Optimizer
from training.optimizers.groups import Group


class AdamW(Optimizer):
    """Decoupled weight decay; two moments in the parameter's dtype."""

    def __init__(self, groups: list[Group], beta1: float, beta2: float, eps: float) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        super().__init__(groups)

    def first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            "step": torch.zeros((), device=local(parameter).device),
        }

    def update(self, group: Group, lr: float, skip: Tensor) -> None:
        parameters, gradients = self._values(group)
        adamw(
            parameters,
            gradients,
            self._locals(group, "exp_avg"),
            self._locals(group, "exp_avg_sq"),
            [],
            self._locals(group, "step"),
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=group.weight_decay,
            eps=self.eps,
            maximize=False,
        )
