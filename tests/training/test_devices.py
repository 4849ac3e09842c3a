"""Devices of other kinds are told apart, and those of one kind are not."""

import pytest

from training.devices import Card, mixed_devices, named

A100, BIG, H100 = Card("A100", 40 * 2**30), Card("A100", 80 * 2**30), Card("H100", 80 * 2**30)
ALLOW = "parallel.allow_mixed_devices=true"


@pytest.mark.parametrize(
    "cards",
    [
        [A100],
        [A100] * 8,
        [Card("A100", 40 * 2**30), Card("A100", 40 * 2**30 - 300 * 2**20)],  # another driver
        [Card("CPU")] * 4,
    ],
)
def test_one_kind(cards: list[Card]) -> None:
    assert mixed_devices(cards, ALLOW) == []


@pytest.mark.parametrize(
    ("cards", "told", "most"),
    [
        ([A100] * 3 + [H100], "ranks 0-2 have A100 (40.0 GiB); rank 3 has H100 (80.0 GiB)", "A100 (40.0 GiB)"),
        ([A100, BIG, BIG], "rank 0 has A100 (40.0 GiB); ranks 1-2 have A100 (80.0 GiB)", "A100 (80.0 GiB)"),
        ([BIG, H100], "rank 0 has A100 (80.0 GiB); rank 1 has H100 (80.0 GiB)", "A100 (80.0 GiB)"),
        ([H100, Card("CPU")], "rank 0 has H100 (80.0 GiB); rank 1 has CPU", "H100 (80.0 GiB)"),
        (
            [A100, H100, A100, BIG],
            "ranks 0, 2 have A100 (40.0 GiB); rank 1 has H100 (80.0 GiB); rank 3 has A100 (80.0 GiB)",
            "A100 (40.0 GiB)",
        ),
    ],
)
def test_several_kinds(cards: list[Card], told: str, most: str) -> None:
    (problem,) = mixed_devices(cards, ALLOW)
    assert (problem.key, problem.value) == ("parallel.allow_mixed_devices", False)
    assert problem.reason.endswith(told)
    assert problem.instead == f"{ALLOW}, or only ranks with {most}"


def test_ranks_by_name() -> None:
    assert named([5]) == "rank 5"
    assert named([0, 1, 2, 4, 8, 9]) == "ranks 0-2, 4, 8-9"
