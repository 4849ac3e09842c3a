"""A checkpoint that is not whole is never used: the one before it is, and the user is told."""

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training.checkpoint.states import assert_holds, state
from training.checkpoint.store import Store, find
from training.ranks import Ranks
from training.refusal import Refusal


def save_two(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    for step in [900, 1000]:
        store.save(step, state("plain", 1, step), {})


@pytest.fixture(scope="module")
def whole_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    run_ranks(1, save_two, folder)
    return folder


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


FILES = ["__0_0.distcp", ".metadata", "manifest.json", "COMPLETE"]
DAMAGES: list[Callable[[Path], None]] = [Path.unlink, halve, empty]
CASES = [(name, damage) for name in FILES for damage in DAMAGES]
CASES += [(name, overwrite) for name in FILES if not name.endswith(".distcp")]  # same size, other content


def test_these_are_all_the_files(whole_ones: Path) -> None:
    assert sorted(os.listdir(whole_ones / "step-001000")) == sorted(FILES)


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_the_one_before_a_damaged_one_is_used(
    whole_ones: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole_ones, folder)
    damage(folder / "step-001000" / name)
    store = Store(folder, Ranks.alone())

    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None and newest.step == 900
    assert [saved.step for saved in store.all()] == [900]
    assert str(folder / "step-001000") in caplog.text
    assert find(str(tmp_path), Ranks.alone()).step == 900
    with pytest.raises(Refusal, match="step-000900"):  # named as what to write instead
        find(str(folder / "step-001000"), Ranks.alone())


def test_damaged_scores_can_be_computed_again(whole_ones: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    store = Store(tmp_path / "checkpoints", Ranks.alone())
    saved = store.all()[-1]
    assert store.scores(saved) is None
    store.write_scores(saved, {"heldout": {"bits_per_byte": 1.23456789012345678}})
    assert store.scores(saved) == {"heldout": {"bits_per_byte": 1.23456789012345678}}
    halve(saved.folder / "scores.json")
    assert store.scores(saved) is None
    assert store.newest() == saved


def test_nothing_saved_yet(tmp_path: Path) -> None:
    store = Store(tmp_path / "none", Ranks.alone())
    assert store.newest() is None
    assert store.all() == []
    store.prune(3)


def save_anew(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    store.save(1000, state("plain", 1, 7), {"kind": "final"})
    found = state("plain", 1)
    newest = store.newest()
    assert newest is not None and newest.step == 1000 and newest.info == {"kind": "final"}
    store.load(newest, found)
    assert_holds(found, 7)


@pytest.mark.parametrize("name", ["COMPLETE", "__0_0.distcp"])
def test_what_is_left_of_a_step_is_saved_anew(whole_ones: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-001000" / name).unlink()
    (tmp_path / "checkpoints" / "step-001000" / "__7_0.distcp").touch()
    run_ranks(1, save_anew, tmp_path / "checkpoints")
    assert sorted(os.listdir(tmp_path / "checkpoints" / "step-001000")) == sorted(FILES)


def load_damaged(folder: Path) -> None:
    """The bytes of a tensor's header are wrong and the size is right: found when it is read."""
    store = Store(folder, Ranks.alone())
    overwrite(folder / "step-001000" / "__0_0.distcp")
    newest = store.newest()
    assert newest is not None and newest.step == 1000
    with pytest.raises(Refusal, match="step-001000"):
        store.load(newest, state("plain", 1))


def test_a_file_that_cannot_be_read_is_refused_by_name(whole_ones: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    run_ranks(1, load_damaged, tmp_path / "checkpoints")


def kill_while_saving(folder: Path) -> list[int]:
    """Saves step after step in a child that is killed at a random moment; returns the steps it was killed in."""
    store = Store(folder, Ranks.alone())
    store.save(0, state("plain", 1, 0), {})
    start = time.monotonic()
    store.save(1, state("plain", 1, 1), {})
    seconds = time.monotonic() - start
    step = 1
    killed = []
    chance = random.Random(0)
    for _ in range(12):
        child = os.fork()
        if child == 0:
            while True:
                step += 1
                store.save(step, state("plain", 1, step), {})
        time.sleep(chance.uniform(0.0, 4 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        highest = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
        newest = store.newest()
        assert newest is not None and newest.step in [highest, highest - 1]
        if newest.step < highest:
            killed.append(highest)
        found = state("plain", 1)
        store.load(newest, found)
        assert_holds(found, newest.step)
        step = newest.step
    return killed


def test_killed_at_any_moment_of_saving(tmp_path: Path) -> None:
    [killed] = run_ranks(1, kill_while_saving, tmp_path)
    assert killed, "no kill has hit a save, so nothing was tested"
