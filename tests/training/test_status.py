import json
import shlex
from pathlib import Path

import pytest

from training.status import State, Status, command, read

ONE_HOST = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
TWO_HOSTS = ONE_HOST | {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "node7", "MASTER_PORT": "2950"}
UV = {"UV": "/usr/bin/uv"}


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["python", "train.py"], {}, "python train.py"),
        (["/v/bin/python3", "train.py", "steps=5"], UV, "uv run train.py steps=5"),
        (
            ["python", "-u", "train.py", "parallel=fsdp2"],
            ONE_HOST,
            "torchrun --standalone --nproc-per-node 4 train.py parallel=fsdp2",
        ),
        (["python", "-u", "train.py"], ONE_HOST | UV, "uv run torchrun --standalone --nproc-per-node 4 train.py"),
        (
            ["python", "-u", "train.py"],
            TWO_HOSTS,
            "torchrun --nnodes 2 --node-rank 0 --master-addr node7 --master-port 2950 --nproc-per-node 4 train.py",
        ),
    ],
)
def test_the_command_that_goes_on(words: list[str], environment: dict[str, str], expected: str) -> None:
    assert command(words, environment) == expected


def test_the_command_survives_a_shell() -> None:
    words = [
        "python",
        "train.py",
        "checkpoint.allow_changes=[steps,optimizer.lr]",
        "name=it's $HOME",
        "data.files=['*.txt']",
    ]
    assert shlex.split(command(words, {})) == words


def test_status(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read(path) is None
    status = Status(path, "python train.py")
    status.write(State.running)
    assert json.loads(path.read_text()).items() >= {"state": "running", "step": 0, "exit_code": None}.items()
    status.step, status.checkpoint = 40, 30
    status.write(State.saved, 75, "SIGTERM")
    found = read(path)
    assert found is not None
    assert found.pop("time")
    assert found == {
        "state": "saved",
        "step": 40,
        "checkpoint": 30,
        "rollbacks": 0,
        "exit_code": 75,
        "command": "python train.py",
        "message": "SIGTERM",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    ranks = [Status(tmp_path / "status.json", "python train.py") for _ in range(2)]
    ranks[0].write(State.running)
    for status, step in zip(ranks, (9, 7), strict=True):
        status.step = step  # the last each has done
    ranks[1].fail("rank 1: the disk is full", 1)
    ranks[0].fail("rank 0: the other rank is gone", 1)
    found = read(tmp_path / "status.json")
    assert found is not None
    assert (found["state"], found["step"], found["exit_code"]) == ("failed", 7, 1)
    assert found["message"] == "rank 1: the disk is full"
