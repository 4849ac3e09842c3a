"""What the scripts that start runs ask, and what of train.sbatch must not get lost. tests/cluster runs it on a real
Slurm."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.job import outcome, prepared, words_of_task
from tests.ranks import ROOT
from training.refusal import Refusal

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"


@pytest.mark.parametrize("task", range(6))
def test_a_task_of_an_array_is_a_run_of_the_sweep(task: int) -> None:
    """As Hydra numbers them: the last key changes fastest."""
    expected = [(lr, seed) for lr in ("0.001", "0.002") for seed in ("1", "2", "3")][task]
    words = ["steps=5", "optimizer.lr=0.001,0.002", "seed=1,2,3", "data.files=[a,b]"]
    assert words_of_task(words, task) == [
        "steps=5",
        f"optimizer.lr={expected[0]}",
        f"seed={expected[1]}",
        "data.files=[a,b]",
    ]


def test_a_task_too_many_is_refused() -> None:
    with pytest.raises(Refusal, match="--array=0-1"):
        words_of_task(["seed=1,2"], 2)


def test_flags_stay(tmp_path: Path) -> None:
    assert words_of_task(["--config-dir", str(tmp_path), "seed=1,2"], 1) == ["--config-dir", str(tmp_path), "seed=2"]


def test_the_folder_is_the_same_at_each_start(tmp_path: Path) -> None:
    words = ["experiment=tiny", f"out={tmp_path}"]
    [folder, step, *rest] = prepared(words, {})
    assert (folder, step, rest) == (str(tmp_path / "tiny"), "-", [*words, "name=tiny"])
    [folder, _, *rest] = prepared([*words, "seed=1,2", "name=seeds"], {"SLURM_ARRAY_TASK_ID": "1"})
    assert (folder, rest) == (str(tmp_path / "seeds-1"), [*words, "seed=2", "name=seeds-1"])


@pytest.mark.parametrize(
    ("status", "began", "expected"),
    [
        (None, "-", "failed"),
        ({"state": "finished"}, "-", "finished"),
        ({"state": "saved", "message": "stopped by SIGUSR1"}, "-", "again"),
        ({"state": "saved", "message": "stopped by the end of its Slurm job"}, "-", "again"),
        ({"state": "saved", "message": "stopped by SIGTERM"}, "-", "stopped"),
        ({"state": "running", "checkpoint": None}, "-", "failed"),
        ({"state": "running", "checkpoint": 500}, "-", "again"),
        ({"state": "running", "checkpoint": 1000}, "500", "again"),
        ({"state": "failed", "checkpoint": 1000}, "500", "again"),
        ({"state": "failed", "checkpoint": 500}, "500", "failed"),
        ({"state": "failed", "checkpoint": 1000, "exit_code": 2}, "500", "failed"),
    ],
)
def test_outcome(tmp_path: Path, status: dict[str, Any] | None, began: str, expected: str) -> None:
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps({"exit_code": None, "message": "", "checkpoint": 1} | status))
    assert outcome(tmp_path, began) == expected


def test_mistakes_are_told_for_all_ranks_of_the_job() -> None:
    """16 ranks cannot share by threes."""
    command = [sys.executable, "-m", "scripts.job", "words", "2", "8", "parallel.tp=3", "parallel=ddp"]
    asked = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "16 ranks" in asked.stderr


def test_the_script() -> None:
    """torchrun takes only the signals it is told of, and its place to meet is neither the submitting host's nor one
    that two jobs share."""
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["signal"].startswith("USR1@") and "requeue" in options and options["open-mode"] == "append"
    assert re.search(r"--signals-to-handle=\S*\bSIGUSR1\b", text) and "--max-restarts=3" in text
    assert '--rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID"' in text and "29500" not in text
    assert int(options["signal"].partition("@")[2]) > int(re.search(r"TIMEOUT:-(\d+)", text)[1])  # type: ignore[index]
