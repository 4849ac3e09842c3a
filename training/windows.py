"""Windows of attention that grow over the run."""

from models.attention import AttentionCore
from parallel.apply import Spread
from training.metrics.compilation import expect_anew


def window_at(window: int, stages: int, step: int, steps: int) -> int:
    """Tokens that a token sees in a step, counted from 0: of equal stages the first has 1 / stages of the window, the
    last all of it."""
    stage = min(step * stages // steps, stages - 1) + 1
    return -(-window * stage // stages)


class Windows:
    """Sets the windows of a model's blocks before what uses them."""

    def __init__(self, spread: Spread, steps: int) -> None:
        self.spread, self.steps = spread, steps
        self.stages = spread.model.config.window_stages

    def train(self, step: int) -> None:
        """For a step, counted from 0."""
        self._set(step)

    def evaluate(self) -> None:
        """For scores, always the whole window, so that a checkpoint scored again has the same."""
        self._set(self.steps)

    def _set(self, step: int) -> None:
        config, changed = self.spread.model.config, False
        for layer, block in self.spread.model.blocks_by_layer.items():
            whole = config.window_of(layer)
            if whole is None:
                continue
            window = window_at(whole, self.stages, step, self.steps)
            for core in block.modules():
                if isinstance(core, AttentionCore) and core.window != window:
                    core.window, changed = window, True
        if changed:
            expect_anew(self.spread)
