"""Random numbers of a step: derived from seed, step and place, whatever was drawn before."""

import random

import numpy
import torch

from tests.ranks import run_ranks
from training.seeds import make_deterministic, seed_step

Draws = tuple[float, float, float, list[float]]


def draws() -> Draws:
    return (
        random.random(),
        float(numpy.random.rand()),
        torch.rand(()).item(),
        torch.nn.Dropout(0.5)(torch.ones(8)).tolist(),
    )


def seeded(seed: int, step: int, data_rank: int) -> Draws:
    seed_step(seed, step, data_rank)
    return draws()


def a_step_alone() -> Draws:
    return seeded(3, 7, 1)


def test_a_step_repeats_whatever_came_before() -> None:
    first = seeded(3, 7, 1)
    for _ in range(3):
        draws()
    assert seeded(3, 7, 1) == first
    assert run_ranks(1, a_step_alone) == [first]  # in another process, as after a resume


def test_each_generator_differs_by_seed_step_and_place() -> None:
    several = [seeded(*place) for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (2**40, 0, 0)]]
    for generator in range(3):
        assert len({one[generator] for one in several}) == len(several)


def what_becomes_deterministic() -> tuple[bool, bool, str | None]:
    import os

    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.backends.cudnn.benchmark = True
    make_deterministic(True)
    return (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_deterministic_kernels_only() -> None:
    assert run_ranks(1, what_becomes_deterministic) == [(True, False, ":4096:8")]
