"""Two hosts with networks of their own and scripts/host.sh on each, joined by torchrun's c10d rendezvous; one dies."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, hosts, share, wait
from tests.resume.same import check_near, check_same_bits
from tests.runs.drive import DROPOUT, STEPS, Runs

pytestmark = pytest.mark.slow

RUN = (
    "model.layers=1 ++model.parts.feedforward._target_=tests.cluster.paced.Paced evals=none parallel=ddp micro_batch=4"
)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def start_and_lose_the_second(
    runs: Runs, two: list[Host], least: int, words: list[str], log: Path, name: str
) -> "subprocess.Popen[bytes]":
    """The first host's share, when the second has died after a checkpoint."""
    first, second = (share(host, two[0], least, log, words) for host in two)
    deadline = time.monotonic() + 120
    while not runs.checkpoints(name):
        assert first.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)
    assert runs.status(name)["state"] == "running"
    two[1].die()
    second.wait()
    return first


def test_a_host_dies_and_comes_back(runs: Runs, two: list[Host], tmp_path: Path) -> None:
    """Bit by bit, on as many ranks."""
    words = [*runs.words, *RUN.split(), DROPOUT, "name=back"]
    log = tmp_path / "log"
    first = start_and_lose_the_second(runs, two, 2, words, log, "back")
    again = share(two[1], two[0], 2, log, words)
    wait(first, log)
    wait(again, log)
    runs.finish("whole", f"{RUN} {DROPOUT}", ranks=2)
    check_same_bits(runs, "back", "whole", STEPS)


def test_a_host_dies_and_the_other_goes_on(runs: Runs, two: list[Host], tmp_path: Path) -> None:
    """Alone and with the same batches: the numbers are those of two to rounding."""
    words = [*runs.words, *RUN.split(), "precision=fp64", "name=alone"]
    log = tmp_path / "log"
    wait(start_and_lose_the_second(runs, two, 1, words, log, "alone"), log)
    runs.finish("both", f"{RUN} precision=fp64", ranks=2)
    check_near(runs, "alone", "both", relative=1e-9, state=1e-8)
