"""A checkpoint that is not whole is never used: the one before it is, and the user is told."""

import hashlib
import json
import logging
import logging.handlers
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.checkpoint.states import assert_holds, cpu_ranks, state
from training.checkpoint import folders
from training.checkpoint.index import parse_index
from training.checkpoint.retention import Policy
from training.checkpoint.store import Store, find, find_intact
from training.ranks import Ranks
from training.refusal import Refusal


def save_two(folder: Path) -> None:
    ranks = cpu_ranks()
    store = Store(folder, ranks)
    for step in [900, 1000]:
        store.save(step, state("shard", ranks.size, step), {})


@pytest.fixture(scope="module")
def whole_ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    run_ranks(2, save_two, folder, group=True)
    return folder


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    """Of the middle byte; the size is right."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json", "COMPLETE"]
DAMAGES: list[Callable[[Path], None]] = [Path.unlink, halve, empty, flip_a_bit]
SEEN_WHEN_READ = [(name, flip_a_bit) for name in FILES if name.endswith(".distcp")]
CASES = [(name, damage) for name in FILES for damage in DAMAGES if (name, damage) not in SEEN_WHEN_READ]


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


def take_the_intact_one(folder: Path, damages: list[tuple[str, Callable[[Path], None]]]) -> list[str]:
    """Each damage in turn, as a run of these ranks goes on; rank 1 sees no listing. Returns the warnings."""
    ranks = cpu_ranks()
    heard = logging.handlers.MemoryHandler(100)
    logging.getLogger("training").addHandler(heard)
    if ranks.rank == 1:
        Path.iterdir = None  # type: ignore[assignment,method-assign]
    for name, damage in damages:
        copy = folder.with_name(f"{damage.__name__}-{name}")
        if ranks.rank == 0:
            shutil.copytree(folder, copy)
            damage(copy / "step-001000" / name)
        store = Store(copy, ranks)
        saved = store.newest_intact()
        assert saved is not None and saved.step == 900, (name, damage)
        found = state("shard", ranks.size)
        store.load(saved, found)
        assert_holds(found, 900)
        assert find_intact(str(copy), ranks) == saved
        with pytest.raises(Refusal, match="step-001000"):
            find_intact(str(copy / "step-001000"), ranks)
        assert [one.step for one in store.all()] == [900]  # it counts no longer
        if damage is flip_a_bit:
            store.save(1000, state("shard", ranks.size, 7), {})  # takes its place
            newest = store.newest_intact()
            assert newest is not None and newest.step == 1000
    return [record.getMessage() for record in heard.buffer]


@pytest.mark.torch211
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_damage_to_every_file_is_seen_before_it_is_loaded(whole_ones: Path, tmp_path: Path, ranks: int) -> None:
    damages = [(name, damage) for name in FILES for damage in DAMAGES]
    folder = tmp_path / "whole"
    shutil.copytree(whole_ones, folder)
    warnings, *others = run_ranks(ranks, take_the_intact_one, folder, damages, group=True, timeout=120)
    assert not any(others)  # rank 0 alone says it
    for name, damage in damages:
        what = f"{damage.__name__}-{name}/step-001000 is not used: "
        assert any(what in text for text in warnings), what
    assert any("__1_0.distcp is not the one that was saved" in text for text in warnings)


def test_a_damaged_one_that_is_named_is_refused_and_left(whole_ones: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    flip_a_bit(tmp_path / "checkpoints" / "step-001000" / "__0_0.distcp")
    with pytest.raises(Refusal, match=r"step-001000 is damaged: __0_0\.distcp"):
        find_intact(str(tmp_path / "checkpoints" / "step-001000"), Ranks.alone())
    assert find_intact(str(tmp_path), Ranks.alone()).step == 900
    assert find(str(tmp_path), Ranks.alone()).step == 1000  # a reader changes nothing


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, and makes the marker fit."""
    manifest = json.loads((folder / folders.MANIFEST).read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (folder / folders.MANIFEST).write_bytes(data)
    (folder / folders.MARKER).write_text(f"{hashlib.sha256(data).hexdigest()}\n")


def test_one_without_checksums_is_read_by_its_sizes(
    whole_ones: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As versions before wrote it."""
    folder = tmp_path / "checkpoints" / "step-001000"
    shutil.copytree(whole_ones / "step-001000", folder)

    def of_format_1(manifest: dict[str, Any]) -> None:
        sizes = {name: about["size"] for name, about in manifest["files"].items()}
        index = hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()
        manifest |= {"format": 1, "files": sizes, "tensor_index_sha256": index}

    rewrite(folder, of_format_1)
    store = Store(folder.parent, Ranks.alone())
    assert store.newest_intact() is not None
    assert "step-001000 was saved without checksums" in caplog.text
    halve(folder / "__1_0.distcp")
    assert store.newest_intact() is None


def test_a_format_that_is_not_known_is_said(whole_ones: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "step-001000"
    rewrite(folder, lambda manifest: manifest.update(format=3))
    with pytest.raises(Refusal, match="it has format 3, and this version reads 1 and 2"):
        find(str(folder), Ranks.alone())
    rewrite(folder, lambda manifest: manifest.pop("files"))
    with pytest.raises(Refusal, match="step-001000"):
        find(str(folder), Ranks.alone())


# ---- what a stranger may have put into a checkpoint


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", "a\\b", ""])
def test_a_manifest_cannot_name_a_file_elsewhere(whole_ones: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "step-001000"
    about = {"size": 1, "xxh128": "0" * 32}
    rewrite(folder, lambda manifest: manifest["files"].update({name: about}))
    with pytest.raises(Refusal, match="names a file outside of its folder"):
        find(str(folder), Ranks.alone())


@pytest.mark.torch211
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b"])
def test_an_index_cannot_name_a_file_elsewhere(whole_ones: Path, name: str) -> None:
    index = pickle.loads((whole_ones / "step-001000" / ".metadata").read_bytes())
    assert parse_index(pickle.dumps(index)) == index
    next(iter(index.storage_data.values())).relative_path = name
    with pytest.raises(folders.Broken, match=f"names a file outside of its folder: '{name}'"):
        parse_index(pickle.dumps(index))


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.torch211
def test_an_index_runs_no_code(whole_ones: Path, tmp_path: Path) -> None:
    index = pickle.loads((whole_ones / "step-001000" / ".metadata").read_bytes())
    index.planner_data = Malicious(tmp_path / "taken")
    with pytest.raises(folders.Broken, match=r"\.metadata names posix\.mkdir, which is no part of an index"):
        parse_index(pickle.dumps(index))
    assert not (tmp_path / "taken").exists()
    with pytest.raises(folders.Broken, match="is no index"):
        parse_index(pickle.dumps({}))
    with pytest.raises(folders.Broken, match="cannot be read"):
        parse_index(b"garbage")


def test_damaged_scores_can_be_computed_again(whole_ones: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_ones, tmp_path / "checkpoints")
    store = Store(tmp_path / "checkpoints", Ranks.alone())
    saved = store.all()[-1]
    assert store.scores(saved) is None
    store.write_scores(saved, {"heldout": {"bits_per_byte": 1.23456789012345678}})
    assert store.scores(saved) == {"heldout": {"bits_per_byte": 1.23456789012345678}}
    halve(tmp_path / "checkpoints" / "step-001000" / "scores.json")
    assert store.scores(saved) is None
    assert store.newest() == saved


def test_nothing_saved_yet(tmp_path: Path) -> None:
    store = Store(tmp_path / "none", Ranks.alone())
    assert store.newest() is None
    assert store.all() == []
    store.prune(Policy(3))


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
    one_rank = set(FILES) - {"__1_0.distcp"}
    assert set(os.listdir(tmp_path / "checkpoints" / "step-001000")) == one_rank


def load_damaged(folder: Path) -> None:
    """The bytes of a tensor's header are wrong and the size is right, and nobody has looked before it is loaded."""
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
