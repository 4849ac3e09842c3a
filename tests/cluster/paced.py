"""A feed-forward layer that takes its time in the first start of a job, so that something can happen to it."""

import os
import time

from torch import Tensor

from models.feedforward import FeedForward

SECONDS = "PACED_SECONDS"
RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


class Paced(FeedForward):
    """The mathematics is that of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        if all(os.environ.get(count, "0") == "0" for count in RESTARTS):
            time.sleep(float(os.environ.get(SECONDS, "0")))
        return super().forward(x)
