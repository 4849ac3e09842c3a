"""The numbers of each step, kept on the device until they are read together."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from parallel.mesh import LOSS_AXES, sum_over
from training.memory import used_bytes
from training.metrics.experts import expert_records
from training.metrics.records import Record
from training.metrics.throughput import mfu
from training.step import StepResult


class TooManySkipped(Exception):
    """So many steps in a row had a non-finite gradient that the run is not worth going on."""


@dataclass
class Speed:
    """What turns tokens and seconds into the figures people compare."""

    step_tokens: int
    ranks: int
    flops_per_token: float
    peak_flops: float | None  # of one device; None: unknown, and no MFU


class Meters:
    """Collects steps and makes their records. Every rank has them; reading is a collective."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        device: torch.device,
        speed: Speed,
        max_skipped: int,
        recompiles: Callable[[], int] = lambda: 0,
        bubble_share: Callable[[], float] | None = None,
        experts: ModelConfig | None = None,
    ) -> None:
        """bubble_share: of the steps since its last call, with a pipeline. experts: the model, where it has some."""
        self.mesh, self.device, self.speed, self.max_skipped = mesh, device, speed, max_skipped
        self.recompiles = recompiles  # of this start so far
        self.bubble_share, self.experts = bubble_share, experts
        self.tokens = 0  # consumed by the whole run, all its starts
        self.skipped = 0  # the same for steps
        self.skipped_in_a_row = 0
        self.longest_skipped = 0  # so many in a row, however they ended
        self.last_step_seconds = 0.0
        self.stalls: dict[int, float] = {}  # seconds by the step that waited
        self.waiting: list[tuple[int, float, StepResult]] = []
        self.restart_clock(0.0)

    def restart_clock(self, data_wait_seconds: float) -> None:
        """Called after what is not training: time from here on counts. data_wait_seconds: waited for data in all, up to
        now."""
        self.since, self.waited_before = time.perf_counter(), data_wait_seconds

    def stalled(self, step: int, seconds: float) -> None:
        """A save has kept this step, whose record is not read yet, waiting for so long."""
        self.stalls[step] = self.stalls.get(step, 0.0) + seconds

    def add(self, step: int, lr: float, result: StepResult) -> None:
        self.waiting.append((step, lr, result))

    def read(self, data_wait_seconds: float) -> list[Record]:
        """The records of all steps since the last read. Waits for the device once."""
        if not self.waiting:
            return []
        rows = [(result.loss_sum, result.predicted, result.grad_norm, result.skipped) for _, _, result in self.waiting]
        table = torch.stack([torch.stack([value.double() for value in row]) for row in rows])
        table[:, 0] = sum_over(self.mesh, LOSS_AXES, table[:, 0].contiguous())
        values = table.tolist()
        seconds = (time.perf_counter() - self.since) / len(values)
        self.last_step_seconds = seconds
        waited = (data_wait_seconds - self.waited_before) / len(values)
        more: Record = {"recompiles": self.recompiles()}
        if self.bubble_share is not None:
            more["bubble_share"] = self.bubble_share()
        records = [
            self._record(step, lr, row, seconds, waited) | more
            for (step, lr, _), row in zip(self.waiting, values, strict=True)
        ]
        if self.experts is not None:
            nothing = torch.tensor([0.0, -torch.inf, 0.0, 0.0], device=self.device)  # of a stage without experts
            loads = [nothing if result.loads is None else result.loads for _, _, result in self.waiting]
            for record, of_experts in zip(records, expert_records(loads, self.experts, self.mesh), strict=True):
                record |= of_experts
        for record in records:
            if record["step"] in self.stalls:
                record["save_stall_seconds"] = self.stalls.pop(record["step"])
        self.waiting.clear()
        self.restart_clock(data_wait_seconds)
        return records

    def _record(self, step: int, lr: float, row: list[float], seconds: float, waited: float) -> Record:
        loss_sum, predicted, grad_norm, skipped = row
        self.tokens += self.speed.step_tokens
        self.skipped += int(skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.longest_skipped = max(self.longest_skipped, self.skipped_in_a_row)
        tokens_per_second = self.speed.step_tokens / seconds
        per_device = tokens_per_second / self.speed.ranks
        return {
            "step": step,
            "loss": loss_sum / max(predicted, 1.0),
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "step_seconds": seconds,
            "data_wait_share": waited / seconds,
            "mfu": mfu(per_device, self.speed.flops_per_token, self.speed.peak_flops),
            "memory_bytes": used_bytes(self.device),
            "skipped_steps": self.skipped,
        }

    def check_skipped(self, step: int) -> None:
        """Raises TooManySkipped, on every rank, where max_skipped steps in a row were, also if better ones followed
        before the read."""
        if self.longest_skipped >= self.max_skipped:
            raise TooManySkipped(
                f"the gradient was not finite in {self.longest_skipped} steps in a row, "
                f"up to step {step}: the last good checkpoint is kept. "
                "A lower optimizer.lr, a longer warm-up or optimizer.clip are what usually helps"
            )
