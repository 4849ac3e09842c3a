"""Random numbers are derived at each step, so nothing of them is saved and nothing between steps disturbs them."""

import os
import random

import numpy
import torch

from models.derive import derive


def seed_step(seed: int, step: int, coordinate: int) -> None:
    """Seeds python, numpy, torch and its devices for one step of a rank (parallel.mesh.random_coordinate)."""
    value = derive(seed, "step", step, coordinate)
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)


def make_deterministic(wanted: bool) -> None:
    """Whether kernels whose bits differ from run to run are refused. To be called before a GPU is used."""
    if wanted != torch.are_deterministic_algorithms_enabled():  # to set it imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(wanted)
    if not wanted:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
