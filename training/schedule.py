"""The learning rate as a pure function of the step. A skipped step counts as a step. No torch here."""

import math

from training.config import ScheduleConfig, ScheduleKind

DEFAULT_WARMUP_SHARE = 0.05
DEFAULT_DECAY_SHARE = 0.2


def _in_steps(
    steps: int | None, tokens: int | None, share: float | None, default: float, total: int, batch_tokens: int
) -> int:
    """One length given in steps, tokens or a share of the run, or not given."""
    if steps is not None:
        return steps
    if tokens is not None:
        return math.ceil(tokens / batch_tokens)
    return round((default if share is None else share) * total)


class Schedule:
    """lr(step) for a run of `steps` steps of `batch_tokens` tokens each."""

    def __init__(self, config: ScheduleConfig, peak: float, steps: int, batch_tokens: int) -> None:
        self.kind, self.peak, self.final, self.steps = config.kind, peak, peak * config.final_share, steps
        self.warmup = _in_steps(
            config.warmup_steps, config.warmup_tokens, config.warmup_share, DEFAULT_WARMUP_SHARE, steps, batch_tokens
        )
        self.decay = _in_steps(
            config.decay_steps, config.decay_tokens, config.decay_share, DEFAULT_DECAY_SHARE, steps, batch_tokens
        )

    def lr(self, step: int) -> float:
        """The rate used in `step`, the first of which is 0. Warm-up rises to the peak in its last step, as in GPT-2's
        reproductions (nanoGPT, llm.c); decay would reach final_share x peak in step number `steps`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind is ScheduleKind.constant:
            return self.peak
        start = self.steps - self.decay if self.kind is ScheduleKind.warmup_stable_decay else self.warmup
        progress = min(max((step - start) / max(self.steps - start, 1), 0.0), 1.0)
        if self.kind is ScheduleKind.warmup_cosine:
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.peak + (self.final - self.peak) * progress
