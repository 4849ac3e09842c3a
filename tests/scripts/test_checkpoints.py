"""scripts.checkpoints on checkpoints whose contents are known."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.checkpoints import main
from tests.ranks import ROOT, run_ranks
from training.checkpoint import folders
from training.checkpoint.store import Store
from training.folder import RunFolder
from training.ranks import Ranks

CONFIG = {"optimizer.lr": 0.1, "model.dim": 8, "checkpoint.keep": 2, "checkpoint.keep_best": None}


def save_run(folder: Path) -> None:
    store = Store(folder / "checkpoints", Ranks.alone())
    for step in (10, 20, 30, 40):
        state = {
            "model.a": torch.full((3, 4), 2.0),
            "model.b": torch.full((4,), 1.0 + step),
            "optimizer.a.exp_avg": torch.zeros(3, 4, dtype=torch.bfloat16),
        }
        info = {"kind": "scheduled", "tokens": 100 * step, "permanent": step == 20, "config": CONFIG}
        saved = store.save(step, state, info)
        scores = [{"task": "heldout", "metric": "loss", "value": 5 - step / 10 if step < 30 else 9.0}]
        store.write_scores(saved, {"scores": scores})
    state["model.c"] = state.pop("model.a")
    state["optimizer.a.exp_avg"] = torch.zeros(12, dtype=torch.bfloat16)
    Store(folder / "other", Ranks.alone()).save(40, state, info | {"config": CONFIG | {"optimizer.lr": 0.2}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script") / "run"
    run_ranks(1, save_run, folder)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:06d}"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Said:
    """Runs the script; keeps what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: Any) -> tuple[int, str]:
        code = main([str(word) for word in words])
        return code, self.capsys.readouterr().out

    def json(self, *words: Any) -> tuple[int, Any]:
        code, text = self(*words, "--json")
        return code, json.loads(text)

    def refused(self, *words: Any) -> str:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert end.value.code == 2
        return self.capsys.readouterr().err


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def test_list(run: Path, script: Said) -> None:
    (step(run, 30) / "COMPLETE").unlink()
    code, lines = script.json("list", run)
    assert code == 0 and [line["checkpoint"] for line in lines] == [f"step-0000{n}" for n in (10, 20, 30, 40)]
    assert lines[1] == {
        "checkpoint": "step-000020",
        "whole": True,
        "step": 20,
        "bytes": sum((step(run, 20) / name).stat().st_size for name in ("__0_0.distcp", ".metadata")),
        "kind": "scheduled",
        "permanent": True,
        "tokens": 2000,
        "scores": {"heldout.loss": 3.0},
    }
    assert lines[2] == {"checkpoint": "step-000030", "whole": False, "reason": "the save did not end"}
    code, text = script("list", run / "checkpoints")
    assert code == 0 and re.search("scheduled, permanent +heldout.loss 3.0000", text) and "not whole: the save" in text
    assert script.json("list", step(run, 10))[1] == lines[:1]


def test_verify(run: Path, script: Said) -> None:
    assert script("verify", run)[0] == 0
    flip(step(run, 30) / "__0_0.distcp")
    code, lines = script.json("verify", run)
    assert code == 1 and [line["intact"] for line in lines] == [True, True, False, True]
    assert lines[2]["faults"] == ["__0_0.distcp is not the one that was saved: its checksum is another"]
    code, text = script("verify", step(run, 30))
    assert code == 1 and "__0_0.distcp is not" in text
    assert script("verify", step(run, 40))[0] == 0
    assert (step(run, 30) / "COMPLETE").exists()  # it only looks


def test_diff(run: Path, script: Said) -> None:
    assert script.json("diff", run, step(run, 40))[0] == 0
    code, found = script.json("diff", step(run, 10), step(run, 40))
    assert code == 1 and (found["same"], found["different"]) == (2, 1)
    assert found["values"] == [{"tensor": "model.b", "largest": 30.0, "relative": pytest.approx(30 / 11)}]
    code, found = script.json("diff", run, run / "other")
    assert code == 1
    assert found["config"] == {"optimizer.lr": [0.1, 0.2]}
    assert (found["only_in_one"], found["only_in_other"]) == (["model.a"], ["model.c"])
    assert found["shapes"] == {"optimizer.a.exp_avg": [[3, 4], [12]]}
    code, text = script("diff", run, run / "other")
    assert "config  optimizer.lr: 0.1 -> 0.2" in text and "only in the first  model.a" in text


def test_copy(run: Path, tmp_path: Path, script: Said) -> None:
    target = tmp_path / "copies"
    assert script("copy", run, target)[0] == 0
    copied, original = target / "step-000040", step(run, 40)
    assert sorted(os.listdir(copied)) == sorted(os.listdir(original))
    assert all((copied / name).read_bytes() == (original / name).read_bytes() for name in os.listdir(original))
    assert script("verify", target)[0] == 0
    assert "is there already" in script.refused("copy", run, target)


def test_what_is_damaged_is_not_copied(run: Path, tmp_path: Path, script: Said) -> None:
    flip(step(run, 40) / "__0_0.distcp")
    assert script("copy", run, tmp_path / "copies")[0] == 1
    assert os.listdir(tmp_path / "copies") == []


def test_prune(run: Path, script: Said) -> None:
    code, found = script.json("prune", run)
    assert code == 0 and found == {"would_delete": [str(step(run, 10))]}  # of 10, 30 and 40 two stay; 20 is permanent
    assert step(run, 10).exists()
    best = ("--keep", 0, "--keep-best", "heldout.loss", "--best-is", "lowest")
    assert script.json("prune", run, "--keep", 0)[1] == {"would_delete": [str(step(run, 10)), str(step(run, 30))]}
    (step(run, 20) / "manifest.json").unlink()  # 10 is the best then
    assert script.json("prune", run, *best)[1] == {"would_delete": [str(step(run, 30))]}
    code, found = script.json("prune", run, *best, "--yes")
    assert code == 0 and found == {"deleted": [str(step(run, 30))]}
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-000010",
        "step-000020",
        "step-000040",
    ]


def test_prune_deletes_nothing_for_a_damaged_one(run: Path, script: Said) -> None:
    flip(step(run, 40) / "__0_0.distcp")
    assert script("prune", run, "--keep", 0, "--yes")[0] == 1
    assert len(list((run / "checkpoints").glob("step-*/COMPLETE"))) == 4


def test_prune_leaves_a_run_that_goes_on_alone(run: Path) -> None:
    holder = RunFolder("", "", str(run / "checkpoints"))
    assert holder.hold_checkpoints() == []
    words = [sys.executable, "-m", "scripts.checkpoints", "prune", str(run), "--yes"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)  # a process's own lock is none for itself
    holder.release()
    assert done.returncode == 2 and "another process" in done.stderr and "Traceback" not in done.stderr
    assert step(run, 10).exists()


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_mistake_is_said_without_a_traceback(run: Path, tmp_path: Path, script: Said, command: str) -> None:
    assert "there is no such folder" in script.refused(command, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "has no checkpoints" in script.refused(command, tmp_path / "empty")


def test_more_mistakes(run: Path, tmp_path: Path, script: Said) -> None:
    assert "there is no such folder" in script.refused("diff", run, tmp_path / "absent")
    assert "there is no such folder" in script.refused("copy", tmp_path / "absent", tmp_path)
    assert "--keep" in script.refused("prune", run, "--keep", -1)
    (step(run, 20) / "__0_0.distcp").write_bytes(bytes((step(run, 20) / "__0_0.distcp").stat().st_size))
    assert "`verify`" in script.refused("diff", step(run, 20), run)
    assert "is one checkpoint" in script.refused("prune", step(run, 10))
    (tmp_path / "file").touch()
    assert "Not a directory" in script.refused("copy", run, tmp_path / "file")
    script.refused("forget", run)
    assert folders.read(step(run, 10)).step == 10
