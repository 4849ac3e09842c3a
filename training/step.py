"""One optimizer step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.moe import balance, load_statistics, share_losses
from models.roles import NOT_LEARNED, parameter_roles
from parallel.apply import Spread
from parallel.gradients import clip, global_norm, sum_alike, sum_whole
from parallel.mesh import DATA_AXES, sum_over
from training.agreement import Agreement
from training.optimizers.base import Optimizer
from training.watchdog import Progress


@dataclass
class StepResult:
    """Scalars on the device, not read until they are logged."""

    loss_sum: Tensor  # nats, over this rank's predicted tokens
    predicted: Tensor  # predicted tokens of all ranks
    grad_norm: Tensor  # of the whole gradient, before clipping
    skipped: Tensor  # 1 where the step changed nothing: a non-finite gradient, or nothing to predict
    loads: Tensor | None = None  # of experts, models.moe.load_statistics


class Step:
    """Forward and backward over the micro-batches, one norm, one clip, one update. Reads nothing from the device."""

    def __init__(self, spread: Spread, mesh: DeviceMesh | None, optimizer: Optimizer, clip_norm: float | None) -> None:
        self.spread = spread
        self.mesh = mesh
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        roles = parameter_roles(spread.model)
        learned = {name: p for name, p in spread.model.named_parameters() if roles[name] not in NOT_LEARNED}
        self.parameters = list(learned.values())
        self.counted = [p for name, p in learned.items() if name not in spread.model.copies]
        self.progress = Progress()

    def __call__(
        self, micro_batches: list[dict[str, Any]], predicted: int, lr: float, agreement: Agreement | None = None
    ) -> StepResult:
        """micro_batches: tokens and labels [micro_batch, seq] each; predicted: labels on this rank that count;
        agreement: what is compared over ranks on the way, which waits for the device."""
        result = self.backward(micro_batches, predicted)
        if agreement is not None:
            agreement.check_gradients()
        self.progress.at("the optimizer")
        if self.clip_norm is not None:
            clip(self.parameters, result.grad_norm, self.clip_norm)
        self.optimizer.step(lr, result.skipped)
        balance(self.spread.model, result.skipped)
        if self.spread.powersgd is not None:
            self.spread.powersgd.keep(result.skipped)
        if agreement is not None:
            agreement.check_state()
        self.zero_grad()
        return result

    def zero_grad(self) -> None:
        self.spread.model.zero_grad()

    def backward(self, micro_batches: list[dict[str, Any]], predicted: int) -> StepResult:
        """Leaves in each parameter the gradient of the loss: the sum of token losses over the predicted tokens of the
        whole step."""
        device = micro_batches[0]["tokens"].device
        dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        everyone = sum_over(self.mesh, DATA_AXES, torch.tensor(predicted, dtype=torch.float64, device=device))
        everyone /= self.spread.sequence_ranks  # each of which has counted the same sequences
        divisor = everyone.clamp(min=1)
        share_losses(self.spread.model, divisor)
        if self.spread.pipeline is not None:
            self.progress.at("the pipeline's passes")
            loss_sum = self.spread.step(micro_batches, divisor)
        else:
            loss_sum = torch.zeros((), dtype=dtype, device=device)
            for place, inputs in enumerate(micro_batches):
                with self.spread.micro_batch(last=place == len(micro_batches) - 1):
                    self.progress.at("the forward pass")
                    loss = self.spread.forward(**inputs)
                    self.progress.at("the backward pass")
                    (loss / divisor).sum().backward()
                    loss_sum += loss.detach().sum()
        if self.spread.powersgd is not None:
            self.spread.powersgd.sum_gradients()
        if self.spread.alike:
            assert self.mesh is not None
            sum_alike(self.spread.model, self.spread.alike, self.mesh)
        for shared in self.spread.shared:
            shared.sum_gradients()
        if self.spread.whole:
            assert self.mesh is not None
            sum_whole(self.spread.whole, self.mesh)
        norm = global_norm(self.counted, self.mesh)
        skipped = (~torch.isfinite(norm) | (everyone == 0)).to(torch.float32)
        return StepResult(loss_sum, everyone, norm, skipped, load_statistics(self.spread.model))
