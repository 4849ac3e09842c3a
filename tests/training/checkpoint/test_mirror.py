"""Copies in the background, on a disk; tests/training/checkpoint/test_remote.py has them in a store."""

import logging
import logging.handlers
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import torch

from tests.ranks import run_ranks
from tests.runs.drive import REFUSED, Runs, hit_in_call, hit_in_step
from training.checkpoint import folders, storage
from training.checkpoint.mirror import Mirror, copy_missing
from training.checkpoint.retention import Policy
from training.checkpoint.store import Store
from training.ranks import Ranks


def save(folder: Path, step: int, permanent: bool = False) -> None:
    info = {"kind": "scheduled", "permanent": permanent}
    Store(folder, Ranks.alone()).save(step, {"model.a": torch.full((3,), float(step))}, info)


def go_through_passes(folder: Path) -> None:
    here, there = folder / "here", folder / "there"
    source, target, policy = Store(here, Ranks.alone()), Store(there, Ranks.alone()), Policy(1)
    for step in (1, 2, 3):
        save(here, step, permanent=step == 1)
    copy_missing(here, there, policy)
    assert [saved.step for saved in target.all()] == [1, 3]  # the permanent one and the newest
    for saved in target.all():
        assert storage.faults(saved.folder, saved.files) == []

    source.write_scores(source.all()[-1], {"scores": []})  # come later
    save(here, 4)
    (there / "step-000004").mkdir()  # cut short
    copy_missing(here, there, policy)
    assert [saved.step for saved in target.all()] == [1, 4]
    source.write_scores(source.all()[-1], {"scores": [1]})
    copy_missing(here, there, policy)
    assert target.scores(target.all()[-1]) == {"scores": [1]}

    save(here, 5, permanent=True)
    save(here, 6)
    path = here / "step-000005" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    copy_missing(here, there, policy)
    assert [saved.step for saved in target.all()] == [1, 6]  # no damage is copied, and it keeps no other from being
    assert [saved.step for saved in source.all()] == [1, 2, 3, 4, 5, 6]


def copy_over_another(folder: Path) -> None:
    for name in ("ours", "theirs"):
        info = {"kind": "scheduled", "config": {"name": name}}
        Store(folder / name, Ranks.alone()).save(3, {"model.a": torch.zeros(3)}, info)
    with pytest.raises(FileExistsError, match="checkpoints of another run, theirs"):
        copy_missing(folder / "ours", folder / "theirs", Policy(0))
    assert Store(folder / "theirs", Ranks.alone()).all()[0].info["config"] == {"name": "theirs"}


def test_another_runs_checkpoints_are_left(tmp_path: Path) -> None:
    run_ranks(1, copy_over_another, tmp_path)


def test_passes(tmp_path: Path) -> None:
    run_ranks(1, go_through_passes, tmp_path)


def fail_at_first(folder: Path) -> list[str]:
    heard = logging.handlers.MemoryHandler(100)
    logging.getLogger("training").addHandler(heard)
    (folder / "there").write_text("a file in its place")
    save(folder / "here", 1)
    mirror = Mirror(folder / "here", folder / "there", Policy(3))
    while not heard.buffer:
        pass
    (folder / "there").unlink()
    save(folder / "here", 2)
    mirror.saved()
    mirror.finish()
    assert [saved.step for saved in Store(folder / "there", Ranks.alone()).all()] == [2]
    return [record.getMessage() for record in heard.buffer]


def test_a_failure_is_said_and_tried_again(tmp_path: Path) -> None:
    [said] = run_ranks(1, fail_at_first, tmp_path)
    assert any("not all checkpoints are at" in text and "after the next save" in text for text in said)


def test_a_run(runs: Runs, tmp_path: Path) -> None:
    """Killed in the midst of a copy and stopped; its checkpoints lost, it goes on from the copies."""
    words = f"checkpoint.mirror={tmp_path / 'copies'} checkpoint.keep=1"
    runs.die("mirrored", words, partial(hit_in_call, "training.checkpoint.folders", "copy_file", SIGKILL))
    runs.start("mirrored", words, partial(hit_in_step, 8, SIGTERM))
    copies = tmp_path / "copies"
    assert max(path.parent.name for path in copies.glob("step-*/COMPLETE")) == "step-000008"
    (runs.folder("mirrored") / "checkpoints").rename(tmp_path / "lost")
    outcome = runs.start("mirrored", words)[0]
    assert outcome.code == REFUSED and f"scripts.checkpoints copy {copies} " in outcome.said
    newest = folders.newest(copies)
    assert newest is not None
    folders.copy(newest, runs.folder("mirrored") / "checkpoints")
    said = runs.finish("mirrored", words)
    assert "step-000008" in said and f"waiting for the copies at {copies}" in said
    runs.finish("not-mirrored")
    assert runs.records("mirrored") == runs.records("not-mirrored")
    assert max(path.parent.name for path in copies.glob("step-*/COMPLETE")) == "step-000012"


@pytest.mark.parametrize("given", ["checkpoint.mirror=s4://a", "checkpoint.mirror=/a checkpoint.dir=/a"])
def test_what_cannot_be_a_mirror(runs: Runs, given: str) -> None:
    outcome = runs.start("no-mirror", given)[0]
    assert outcome.code == REFUSED and "checkpoint.mirror=" in outcome.said
