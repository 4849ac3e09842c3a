"""The health check names the rank that is slow, wrong or broken on purpose."""

import time

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.runs.drive import put
from training import health
from training.health import BadHost, check_health
from training.ranks import Ranks

CPU = torch.device("cpu")
FACTOR = 20.0  # ranks of a test share cores


def meddle(kind: str) -> None:
    """On this rank."""
    real_product, real_copy, real_sum = health.multiply, health.copy, torch.distributed.all_reduce

    def wrong_product(a: Tensor, b: Tensor) -> Tensor:
        product = real_product(a, b)
        product[17, 101] += 1
        return product

    def broken_product(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("an uncorrectable error")

    def slow_copy(values: Tensor) -> Tensor:
        time.sleep(0.3)
        return real_copy(values)

    def wrong_copy(values: Tensor) -> Tensor:
        copied = real_copy(values)
        copied.view(torch.int32)[4321] ^= 1 << 20  # one bit
        return copied

    def wrong_sum(values: Tensor) -> None:
        real_sum(values)
        values[7] *= 1 + 1e-6

    whats = {
        "wrong product": (health, "multiply", wrong_product),
        "broken product": (health, "multiply", broken_product),
        "slow copy": (health, "copy", slow_copy),
        "wrong copy": (health, "copy", wrong_copy),
        "wrong sum": (torch.distributed, "all_reduce", wrong_sum),
    }
    put(*whats[kind])


def healths(kinds: list[str]) -> list[tuple[str, list[str]]]:
    """For each what is said and warned of, or the error, where rank 1 has this fault."""
    import torch.distributed as dist

    ranks = Ranks(dist.group.WORLD)
    found: list[tuple[str, list[str]]] = []
    kept = health.multiply, health.copy, dist.all_reduce
    for kind in kinds:
        if ranks.rank == 1 and kind:
            meddle(kind)
        try:
            found.append(check_health(CPU, ranks, FACTOR))
        except BadHost as error:
            found.append((str(error), []))
        health.multiply, health.copy, dist.all_reduce = kept
    return found


def test_the_bad_rank_is_named_on_all_ranks() -> None:
    faults = {
        "wrong product": "a matrix product is wrong",
        "broken product": "matrix product failed: an uncorrectable error",
        "wrong copy": "memory does not hold what is written",
        "wrong sum": "a sum over all ranks is wrong",
    }
    every = run_ranks(3, healths, list(faults), group=True)
    for told in every:
        for (said, _), fault in zip(told, faults.values(), strict=True):
            assert said.startswith("health check: host ") and said.endswith(f", rank 1 (CPU): {fault}"), said


def test_a_slow_rank_is_warned_of_and_a_healthy_one_is_not() -> None:
    for healthy, slow in run_ranks(3, healths, ["", "slow copy"], group=True):
        assert healthy[1] == [] and "all-reduce" in healthy[0]
        [warning] = slow[1]
        assert ", rank 1 (CPU) is slow: its memory takes " in warning


def test_alone_too() -> None:
    told, warnings = check_health(CPU, Ranks.alone(), FACTOR)
    assert warnings == [] and "matrix product" in told and "all-reduce" not in told


@pytest.mark.parametrize("size", [64, 257])
def test_the_product_that_is_tried_is_exact(size: int) -> None:
    """So that a right one is never called wrong: its partial sums are whole numbers below 2^24."""
    assert 3 * 2 * size < 2**24
    assert health.matrix_product(CPU, size)[1] == ""
    assert 3 * 2 * health.CUDA.matrix < 2**24
