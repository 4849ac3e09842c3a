import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.schema import Changes
from training.check import describe
from training.config import Config, Resume, Shuffle, leaves
from training.folder import RunFolder, as_typed, changes_by_key, claim, differences, refuse_changes
from training.resolve import Chosen
from training.status import State, Status


def changed(**keys: Any) -> Config:
    config = Config(steps=100, batch_sequences=8)
    for key, value in keys.items():
        *groups, name = key.split("__")
        target: Any = config
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return config


SAVED = leaves(changed())


def test_every_key_has_a_category() -> None:
    categories = changes_by_key()
    assert list(categories) == list(leaves(Config()))
    assert categories["optimizer.lr"] is Changes.math
    assert categories["parallel.dp_shard"] is Changes.layout
    assert categories["data.cache"] is Changes.io  # of its own, though data is math


def test_differences_are_named_with_their_category() -> None:
    now = changed(optimizer__lr=0.5, micro_batch=2, metrics__every=1, data__shuffle=Shuffle.none, checkpoint__keep=1)
    found = {d.key: (d.saved, d.now, d.changes.name) for d in differences(SAVED, now)}
    assert found == {
        "optimizer.lr": (1e-3, 0.5, "math"),
        "micro_batch": (None, 2, "layout"),
        "metrics.every": (10, 1, "io"),
        "data.shuffle": ("full", "none", "math"),
        "checkpoint.keep": (3, 1, "io"),
    }


def test_nothing_differs_after_json() -> None:
    assert differences(json.loads(json.dumps(SAVED)), changed()) == []


def test_true_is_not_one() -> None:
    (found,) = differences(SAVED, changed(parallel__reshard_after_forward=1))
    assert found.key == "parallel.reshard_after_forward"


def test_a_config_of_another_version() -> None:
    older = {key: value for key, value in SAVED.items() if key != "optimizer.lr"}
    assert differences(older, changed()) == []  # the key did not exist: its default was what happened
    (found,) = differences(older, changed(optimizer__lr=0.5))
    assert (found.saved, found.now) == (1e-3, 0.5)
    (found,) = differences(SAVED | {"optimizer.gone": 3}, changed())
    assert (found.key, found.saved, found.now, found.changes) == ("optimizer.gone", 3, None, Changes.math)


def test_only_mathematics_is_refused_and_all_of_it_at_once() -> None:
    found = differences(SAVED, changed(optimizer__lr=0.5, optimizer__clip=None, metrics__every=1, parallel__tp=2))
    problems = refuse_changes(found, [])
    assert [problem.key for problem in problems] == ["optimizer.lr", "optimizer.clip"]
    assert "checkpoint.allow_changes=[optimizer.lr,optimizer.clip]" in problems[0].instead
    assert "name=" in problems[0].instead
    assert "optimizer.clip=null" in str(problems[1])
    assert "optimizer.clip=1.0" in problems[1].instead
    assert [problem.key for problem in refuse_changes(found, ["optimizer.lr"])] == ["optimizer.clip"]
    assert refuse_changes(found, ["optimizer.lr", "optimizer.clip"]) == []


def test_a_typo_in_allow_changes_is_refused() -> None:
    (problem,) = refuse_changes([], ["optimizer.lrr"])
    assert (problem.key, problem.value) == ("checkpoint.allow_changes", "optimizer.lrr")


def test_values_as_typed() -> None:
    assert [as_typed(value) for value in (None, True, False, 1, 0.5, "a", ["a", None], [])] == [
        "null",
        "true",
        "false",
        "1",
        "0.5",
        "a",
        "[a,null]",
        "[]",
    ]


OTHER = leaves(changed(optimizer__lr=0.5))


@pytest.mark.parametrize(
    ("resume", "saved", "has_checkpoint", "has_numbers", "goes_on", "refused"),
    [
        # an empty folder
        (Resume.auto, None, False, False, False, []),
        (Resume.never, None, False, False, False, []),
        (Resume.must, None, False, False, False, ["checkpoint.resume"]),
        # died before its first step: nothing to lose
        (Resume.auto, OTHER, False, False, False, []),
        # died before its first checkpoint
        (Resume.auto, SAVED, False, True, False, []),
        (Resume.auto, OTHER, False, True, False, ["name"]),
        (Resume.never, SAVED, False, True, False, ["name"]),
        (Resume.must, SAVED, False, True, False, ["checkpoint.resume"]),
        # has a checkpoint
        (Resume.auto, SAVED, True, True, True, []),
        (Resume.must, SAVED, True, True, True, []),
        (Resume.never, SAVED, True, True, False, ["name"]),
        (Resume.auto, OTHER, True, True, True, ["optimizer.lr"]),
        (Resume.must, OTHER, True, False, True, ["optimizer.lr"]),
    ],
)
def test_claim(
    tmp_path: Path,
    resume: Resume,
    saved: dict[str, Any] | None,
    has_checkpoint: bool,
    has_numbers: bool,
    goes_on: bool,
    refused: list[str],
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.path.mkdir()
    if has_numbers:
        (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    found = claim(folder, changed(checkpoint__resume=resume), saved, has_checkpoint)
    assert found.goes_on == goes_on
    assert [problem.key for problem in found.problems] == refused
    for problem in found.problems:
        if problem.key == "name":  # the two ways out
            assert "name=<another>" in problem.instead
            assert f"delete {folder.path}" in problem.instead


def test_a_run_whose_checkpoints_are_not_found_is_not_started_anew(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run", str(tmp_path / "elsewhere"))
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
    status = Status(folder.status_path, "python train.py")
    status.step = 7
    status.write(State.running)
    assert claim(folder, changed(), SAVED, False).problems == []  # it has none yet
    status.checkpoint = 5
    status.write(State.running)
    (problem,) = claim(folder, changed(), SAVED, False).problems
    assert (problem.key, problem.value) == ("checkpoint.dir", tmp_path / "elsewhere")
    assert "step 5" in problem.reason
    assert "name=<another>" in problem.instead and f"delete {folder.path}" in problem.instead
    assert claim(folder, changed(), SAVED, True).problems == []


def test_claim_with_allowed_changes_shows_them(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    found = claim(folder, changed(checkpoint__allow_changes=["optimizer.lr"]), OTHER, True)
    assert found.goes_on
    assert found.problems == []
    assert "optimizer.lr: 0.5 -> 0.001 (math)" in [str(difference) for difference in found.changed]


def test_saved_info(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    assert folder.saved_info() is None
    folder.path.mkdir()
    config = changed(optimizer__eps=1e-12)
    folder.config_path.write_text(describe(config))
    saved = folder.saved_info()
    assert saved is not None
    assert differences(saved["config"], config) == []
    assert saved["from_environment"] == {}
    folder.config_path.write_text(describe(config, Chosen(unresolved={"out": "${oc.env:MY_OUT}"})))
    folder.environment_path.write_text('{"from_environment": {"out": "salt:hash"}}')
    saved = folder.saved_info()
    assert saved is not None
    assert saved["config"]["out"] == "${oc.env:MY_OUT}"
    assert saved["from_environment"] == {"out": "salt:hash"}


def test_a_value_of_the_environment_that_changed_is_refused() -> None:
    found = differences(SAVED | {"optimizer.lr": "${oc.env:LR}"}, changed(optimizer__lr=0.1))
    (problem,) = refuse_changes(found, [])
    assert problem.key == "optimizer.lr" and problem.value == "0.1"
    assert "another value of ${oc.env:LR}" in problem.reason
    assert "checkpoint.allow_changes=[optimizer.lr]" in problem.instead


HOLDER = """
import sys, time
from training.folder import RunFolder
folder = RunFolder(sys.argv[1], "run", sys.argv[2])
assert folder.hold() == folder.hold_checkpoints() == []
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_held_by_one_process_and_free_when_that_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(tmp_path / "shared")],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    folder = RunFolder(str(tmp_path), "run")
    other = RunFolder(str(tmp_path), "another", str(tmp_path / "shared"))
    assert other.hold() == []
    for key, (problem,) in {"name": folder.hold(), "checkpoint.dir": other.hold_checkpoints()}.items():
        assert problem.key == key
        assert f"process {holder.pid}" in problem.reason
    holder.kill()
    holder.communicate()
    assert other.hold_checkpoints() == []
    other.release()
    assert folder.hold() == []
    assert f"process {os.getpid()}" in (folder.path / ".lock").read_text()
    folder.release()
    folder.release()


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = RunFolder(str(tmp_path / "file"), "run").hold()
    assert problem.key == "out"
    (problem,) = RunFolder(str(tmp_path), "run", str(tmp_path / "file" / "there")).hold_checkpoints()
    assert problem.key == "checkpoint.dir" and problem.value == tmp_path / "file" / "there"
