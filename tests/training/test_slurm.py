"""The end of a Slurm job, from its variable or from squeue. tests/cluster asks a real one."""

import logging
import os
from pathlib import Path

import pytest

from training.slurm import job_end


def squeue(folder: Path, answer: str, code: int = 0, job: str = "7") -> dict[str, str]:
    """The environment of a job whose squeue answers so, if it is asked as it should be."""
    path = folder / "squeue"
    asked = f'[ "$SLURM_TIME_FORMAT $*" = "%s --noheader --jobs {job} --format %e" ] || exit 9'
    path.write_text(f"#!/bin/sh\n{asked}\necho {answer}\nexit {code}\n")
    path.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}


def test_outside_of_slurm() -> None:
    assert job_end({}) is None


def test_the_variable_is_enough() -> None:
    assert job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1796083200", "PATH": ""}) == 1796083200


@pytest.mark.parametrize(("answer", "expected"), [("1796083200", 1796083200.0), ("NONE", None), ("", None)])
def test_else_squeue_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: float) -> None:
    environment = squeue(tmp_path, answer)
    monkeypatch.setenv("PATH", environment["PATH"])
    assert job_end(environment) == expected


def test_a_task_of_an_array_is_asked_for_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number may be that of the array, for which all tasks would answer."""
    environment = squeue(tmp_path, "5", job="7_2") | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    monkeypatch.setenv("PATH", environment["PATH"])
    assert job_end(environment) == 5


@pytest.mark.parametrize("fails", [True, False])
def test_without_an_answer_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    environment = squeue(tmp_path, "", code=1) if fails else {"SLURM_JOB_ID": "7"}
    monkeypatch.setenv("PATH", environment.get("PATH", str(tmp_path / "empty")))
    monkeypatch.setattr(logging.getLogger("training"), "propagate", True)  # where another test has begun a run
    assert job_end(environment) is None
    assert "saves only when it gets a signal" in caplog.text and "squeue" in caplog.text
