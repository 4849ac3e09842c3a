import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from training.metrics.environment import environment, git


def test_environment_can_be_written() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == version("torch")
    assert found["cores"] >= 1


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    assert git(tmp_path) is None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    run("init", "-q")
    assert git(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    run("add", "a")
    run("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    assert git(tmp_path) == {"commit": run("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git(tmp_path) == {"commit": run("rev-parse", "HEAD"), "dirty": True}
