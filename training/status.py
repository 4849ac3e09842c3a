"""status.json: where a run stands, for scripts. torchrun hides the exit code of its workers, so it is written here."""

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from training.files import write_json


class State(Enum):
    running = "running"
    finished = "finished"
    saved = "saved"  # stopped by a signal or a limit after saving: run it again
    failed = "failed"


class Status:
    """The status file of one run, written by rank 0 and by any rank that fails. A run that is killed leaves `running`.

    Every rank keeps what it will say: `step`, the last one done, `checkpoint`, the step of the newest one the run
    has, and `rollbacks`, how often it has gone back because of a spike."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self.command = command
        self.step = 0
        self.checkpoint: int | None = None
        self.rollbacks = 0

    def write(self, state: State, exit_code: int | None = None, message: str = "") -> None:
        """exit_code: of train.py itself; None while it runs."""
        write_json(
            self.path,
            {
                "state": state.name,
                "step": self.step,
                "checkpoint": self.checkpoint,
                "rollbacks": self.rollbacks,
                "exit_code": exit_code,
                "command": self.command,
                "message": message,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            },
        )

    def fail(self, message: str, exit_code: int) -> None:
        """From any rank: the run has failed. The first message stays: a rank that fails because another is gone says
        less."""
        before = read(self.path)
        if before is None or before["state"] != State.failed.name:
            self.write(State.failed, exit_code, message)


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def command(original: Sequence[str] = sys.orig_argv, environment: Mapping[str, str] = os.environ) -> str:
    """The command that goes on with this run: the one that started it, as a shell takes it.

    original: the words that started this Python, such as ["python", "train.py", "steps=10"]. Under torchrun these are a
    worker's, so torchrun's part is rebuilt from the environment it gives its workers.
    """
    python, words = original[0], list(original[1:])
    under_uv = "UV" in environment  # set by `uv run`
    if "TORCHELASTIC_RUN_ID" in environment:
        if words[0] == "-u":  # torchrun's own
            words = words[1:]
        hosts = int(environment["GROUP_WORLD_SIZE"])
        launcher = ["torchrun", "--standalone"]
        if hosts > 1:
            launcher = ["torchrun", "--nnodes", str(hosts), "--node-rank", environment["GROUP_RANK"]]
            launcher += ["--master-addr", environment["MASTER_ADDR"], "--master-port", environment["MASTER_PORT"]]
        words = [*launcher, "--nproc-per-node", environment["LOCAL_WORLD_SIZE"], *words]
    elif not under_uv:
        words = [python, *words]
    return shlex.join(["uv", "run", *words] if under_uv else words)
