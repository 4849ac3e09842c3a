"""Real processes, for what only they show: exit codes, signals, what is imported, torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.ranks import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def environment() -> dict[str, str]:
    """One thread a process, and nothing that this test was launched with."""
    return {name: value for name, value in os.environ.items() if name != "UV"} | {"OMP_NUM_THREADS": "1"}


def start(command: Sequence[str], folder: Path = ROOT) -> "subprocess.Popen[str]":
    """In a process group of its own, so that it can be signalled as a terminal does it."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", seconds: float = 240) -> "subprocess.CompletedProcess[str]":
    """Waits for its end; none of its group lives on."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        kill(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def train(*words: str) -> "subprocess.CompletedProcess[str]":
    return finish(start([sys.executable, "train.py", *words]))


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    """Fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            result = finish(process, 1)
            raise AssertionError(f"too early an end, or too late:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
        time.sleep(0.02)
