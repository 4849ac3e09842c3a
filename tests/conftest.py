"""What holds for all tests."""

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any test imports torch

# What meets torch where its versions differ: these run again on the oldest torch, beside single tests marked torch211.
OLDEST_TORCH = ("tests/parity/", "tests/training/checkpoint/", "tests/training/optimizers/")


# Of its many layouts every fourth; of those that are slow two of three are only tried in an exhaustive run.
MATRIX = "tests/parity/test_parity.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = 0
    for place, item in enumerate(items):
        in_matrix = item.nodeid.startswith(MATRIX)
        if item.nodeid.startswith(OLDEST_TORCH) and not (in_matrix and place % 4):
            item.add_marker(pytest.mark.torch211)
        if in_matrix and item.get_closest_marker("slow") is not None:
            slow += 1
            if slow % 3:
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the server of ranks if a collected test needs it: it imports while other tests run."""
    if "tests.ranks" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["tests.ranks"].start()


def pytest_sessionfinish() -> None:
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].stop()
