"""scripts/host.sh says by its exit code what is to be done next."""

import signal
import subprocess
import sys

import pytest

from tests.cluster.paced import SECONDS
from tests.ranks import ROOT
from tests.resume.same import check_same_bits
from tests.runs import processes
from tests.runs.drive import DROPOUT, REFUSED, SAVED, Runs

pytestmark = pytest.mark.slow

RUN = f"model.layers=1 ++model.parts.feedforward._target_=tests.cluster.paced.Paced {DROPOUT} evals=none parallel=ddp"


def start(runs: Runs, *words: str, paced: float = 0) -> "subprocess.Popen[str]":
    settings = [f"PYTHON={sys.executable}", "RANKS=2", f"{SECONDS}={paced}"]
    command = ["env", *settings, str(ROOT / "scripts" / "host.sh"), *runs.words, *RUN.split(), *words]
    return processes.start(command, folder=runs.out.parent)


def test_told_to_stop_then_finished(runs: Runs) -> None:
    """It alone gets the signal, as the first process of a container does."""
    process = start(runs, "name=host", paced=0.5)
    processes.wait_until(lambda: bool(runs.checkpoints("host")), process)
    process.send_signal(signal.SIGTERM)
    result = processes.finish(process)
    assert result.returncode == SAVED, result.stderr
    assert runs.status("host")["state"] == "saved"
    assert processes.finish(start(runs, "name=host")).returncode == 0
    runs.finish("whole", RUN, ranks=2)
    check_same_bits(runs, "host", "whole")


def test_refused(runs: Runs) -> None:
    result = processes.finish(start(runs, "name=refused", "parallel.tp=3"))
    assert result.returncode == REFUSED and "parallel.tp" in result.stderr
    assert not runs.folder("refused").exists()
