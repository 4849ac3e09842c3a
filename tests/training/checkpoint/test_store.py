import math
import os
import resource
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.checkpoint.states import assert_holds, cpu_ranks, full, state
from training.checkpoint import folders, tensors
from training.checkpoint.retention import Policy
from training.checkpoint.store import SaveFailed, Store, find
from training.ranks import Ranks
from training.refusal import Refusal

INFO: dict[str, Any] = {"tokens": 4096, "kind": "scheduled", "config": {"optimizer.lr": 0.1 + 0.2, "name": None}}


def save_and_find(folder: Path) -> None:
    store = Store(folder / "run" / "checkpoints", Ranks.alone())
    for step in [9, 10]:
        saved = store.save(step, state("plain", 1, step), INFO)
        assert saved.step == step and saved.info == INFO and not saved.permanent
        assert saved.folder == folder / "run" / "checkpoints" / f"step-{step:06d}"
    assert [saved.step for saved in store.all()] == [9, 10]
    assert store.newest() == store.all()[-1]
    for path, step in [("run", 10), ("run/checkpoints", 10), ("run/checkpoints/step-000009", 9)]:
        assert find(str(folder / path), Ranks.alone()).step == step
    Path(str(store.all()[0].folder)).rename(folder / "best")
    assert find(str(folder / "best"), Ranks.alone()).step == 9


def test_saved_is_found_by_each_of_its_folders(tmp_path: Path) -> None:
    run_ranks(1, save_and_find, tmp_path)


def test_find_says_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, reason in [("absent", "no such folder"), ("empty", "no complete checkpoint")]:
        with pytest.raises(Refusal, match=reason) as refused:
            find(str(tmp_path / path), Ranks.alone())
        assert [problem.key for problem in refused.value.problems] == ["checkpoint.load"]


def save_twice(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    first = store.save(5, state("plain", 1, 1), {"kind": "signal"})
    assert store.save(5, state("plain", 1, 2), {"kind": "scheduled"}) == first
    last = store.save(5, state("plain", 1, 2), {"kind": "final", "permanent": True})
    assert last.permanent and last.info == {"kind": "signal"}
    found = state("plain", 1)
    store.load(last, found)
    assert_holds(found, 1)
    with pytest.raises(TypeError):
        store.save(6, state("plain", 1), {"path": folder})
    assert [saved.step for saved in store.all()] == [5]


def test_a_complete_one_is_not_written_again(tmp_path: Path) -> None:
    run_ranks(1, save_twice, tmp_path)


def save_over_another_run(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    theirs = store.save(5, state("plain", 1, 1), {"config": {"name": "theirs"}})
    with pytest.raises(SaveFailed, match="another run"):
        store.save(5, state("plain", 1, 2), {"config": {"name": "ours"}, "permanent": True})
    found = state("plain", 1)
    store.load(theirs, found)
    assert_holds(found, 1)
    assert store.all() == [theirs]  # nor made permanent


def test_another_runs_checkpoint_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    run_ranks(1, save_over_another_run, tmp_path)


def prune(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    for step in [900, 1000, 1100, 9900, 10000]:
        store.save(step, {"model.x": torch.zeros(1)}, {"permanent": step == 1000})
    for place, step in enumerate([10000, 900, 9900, 1000, 1100]):
        os.utime(folder / f"step-{step:06d}", (place, place))
    for step in [950, 9950, 20000]:  # a save that did not end; the last may be going on
        (folder / f"step-{step:06d}").mkdir()
    (folder / "step-009900" / "PERMANENT").touch()  # by hand
    store.prune(Policy(1))
    assert sorted(os.listdir(folder)) == ["step-001000", "step-009900", "step-010000", "step-020000"]
    store.prune(Policy(0))
    assert [saved.step for saved in store.all()] == [1000, 9900, 10000]
    store.remove(store.all()[0])
    assert [saved.step for saved in store.all()] == [9900, 10000]


def test_prune_deletes_the_oldest_by_number_and_what_did_not_end(tmp_path: Path) -> None:
    run_ranks(1, prune, tmp_path)


def stop_a_deletion(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    for step in [1, 2]:
        store.save(step, {"model.x": torch.zeros(1)}, {})

    def refuse(path: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    with mock.patch.object(shutil, "rmtree", refuse):
        store.prune(Policy(1))
    assert [saved.step for saved in store.all()] == [2]
    assert sorted(os.listdir(folder)) == ["step-000001", "step-000002"]


def test_a_deletion_cut_short_leaves_no_checkpoint_and_stops_no_run(tmp_path: Path) -> None:
    run_ranks(1, stop_a_deletion, tmp_path)


def prune_after_damage(folder: Path) -> None:
    ranks = cpu_ranks()
    store = Store(folder, ranks)
    for step in [1, 2, 3]:
        store.save(step, state("shard", 2, step), {})
    (folder / "step-000000").mkdir(exist_ok=True)
    ranks.barrier()
    if ranks.rank == 0:
        path = folder / "step-000003" / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    ranks.barrier()
    with pytest.raises(SaveFailed, match=r"step-000003: read back, __1_0\.distcp is not the one"):
        store.prune(Policy(0))
    assert [saved.step for saved in store.all()] == [1, 2] and (folder / "step-000000").exists()
    store.prune(Policy(0))
    assert [saved.step for saved in store.all()] == [2]


def test_nothing_is_deleted_for_a_newer_one_that_is_damaged(tmp_path: Path) -> None:
    run_ranks(2, prune_after_damage, tmp_path, group=True)


def keep_the_best(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    policy = Policy(1, "heldout.loss")
    for step, loss in [(1, 3.0), (2, 2.0), (3, 2.5), (4, None), (5, 2.2)]:
        kind = "scheduled" if loss else "ephemeral"
        saved = store.save(step, {"model.x": torch.zeros(1)}, {"kind": kind})
        store.prune(policy)
        if loss:
            store.write_scores(saved, {"scores": [{"task": "heldout", "metric": "loss", "value": loss}]})
    assert [saved.step for saved in store.all()] == [2, 5]


def test_the_best_by_its_scores_stays(tmp_path: Path) -> None:
    run_ranks(1, keep_the_best, tmp_path)


# ---- names and shapes


def refused(store: Store, found: dict[str, torch.Tensor]) -> str:
    before = {name: tensor.clone() for name, tensor in found.items()}
    with pytest.raises(Refusal) as error:
        store.load(store.all()[-1], found)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items()), "touched before it was refused"
    return str(error.value)


def load_others(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    store.save(1, state("plain", 1, 1), {})

    model = {name: tensor for name, tensor in state("plain", 1).items() if name.startswith("model.")}
    store.load(store.all()[0], model)  # weights alone: the optimizer's are not missed
    assert_holds(model, 1)

    renamed = state("plain", 1)
    renamed["model.norm.scale"] = renamed.pop("model.norm.weight")
    added = state("plain", 1) | {"model.head.weight": torch.zeros(3)}
    removed = state("plain", 1)
    del removed["optimizer.embedding.weight.exp_avg"]
    shape = state("plain", 1) | {"model.small.weight": torch.zeros(5, 2)}
    narrow = state("plain", 1) | {"model.one.bias": torch.zeros(1, dtype=torch.bfloat16)}
    for found, words in [
        (renamed, ["lacks model.norm.scale", "has model.norm.weight"]),
        (added, ["lacks model.head.weight"]),
        (removed, ["has optimizer.embedding.weight.exp_avg"]),
        (shape, ["model.small.weight is [2, 5]", "[5, 2] here"]),
        (narrow, ["model.one.bias is torch.float32", "torch.bfloat16 here"]),
        (
            renamed | {"model.small.weight": torch.zeros(5, 2)},
            ["lacks model.norm.scale", "has model.norm.weight", "[5, 2]"],
        ),
    ]:
        text = refused(store, found)
        for word in words:
            assert word in text, text

    wide = state("plain", 1, dtype=torch.float64)
    store.load(store.all()[0], wide)
    assert all(torch.equal(tensor, full(name, 1).double()) for name, tensor in wide.items())

    with pytest.raises(Refusal, match=r"\[5, 2\] here"):
        store.load(store.all()[0], shape, strict=False)
    untouched = renamed["model.norm.scale"].clone()
    store.load(store.all()[0], renamed, strict=False)
    assert torch.equal(renamed.pop("model.norm.scale"), untouched)
    assert_holds(renamed, 1)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, load_others, tmp_path)


def load_stages(folder: Path) -> None:
    """Each rank has names of its own, as pipeline stages have: unexpected is what none has."""
    ranks = cpu_ranks()
    names = [["model.a", "model.b"], ["model.c"]][ranks.rank]
    store = Store(folder, ranks)
    store.save(1, {name: torch.full((3,), float(ord(name[-1]))) for name in names}, {})
    found = {name: torch.zeros(3) for name in names}
    store.load(store.all()[0], found)
    assert all(torch.equal(tensor, torch.full((3,), float(ord(name[-1])))) for name, tensor in found.items())
    assert store.verify_restore(store.all()[0], found).different == []
    with pytest.raises(Refusal, match=r"has model\.b, for"):
        store.load(store.all()[0], {name: torch.zeros(3) for name in names if name != "model.b"})


def test_ranks_may_hold_different_names(tmp_path: Path) -> None:
    run_ranks(2, load_stages, tmp_path, group=True)


# ---- ranks that see or do different things


def disk_full(folder: Path) -> tuple[int, int, str]:
    ranks = cpu_ranks()
    store = Store(folder, ranks)
    store.save(1, state("shard", 2, 1), {})
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    with pytest.raises(SaveFailed) as error:
        store.save(2, state("shard", 2, 2), {})
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ranks.barrier()
    assert os.listdir(folder) == ["step-000001"]
    found = state("shard", 2)
    newest = store.newest()
    assert newest is not None
    store.load(newest, found)
    assert_holds(found, 1)
    assert store.save(2, state("shard", 2, 2), {}).step == 2  # there is room again
    return error.value.rank, error.value.step, str(error.value)


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_harms_nothing_else(tmp_path: Path) -> None:
    errors = run_ranks(2, disk_full, tmp_path, group=True)
    assert errors[0] == errors[1]
    assert errors[0][:2] == (1, 2)
    assert errors[0][2].endswith(f"rank 1 failed on {tmp_path / 'step-000002'}: File too large")


def disk_full_at_the_manifest(folder: Path) -> None:
    ranks = cpu_ranks()
    store = Store(folder, ranks)
    store.save(1, state("plain", 2, 1), {})

    def full_disk(path: Path, value: object) -> NoReturn:
        raise OSError(28, "No space left on device", str(path))

    with (
        mock.patch.object(folders, "write_bytes", full_disk),
        pytest.raises(SaveFailed, match=r"rank 0 failed on .*manifest.json: No space left on device"),
    ):
        store.save(2, state("plain", 2, 2), {})
    ranks.barrier()
    assert os.listdir(folder) == ["step-000001"]


def test_a_disk_that_is_full_at_the_manifest(tmp_path: Path) -> None:
    run_ranks(2, disk_full_at_the_manifest, tmp_path, group=True)


def see_nothing(folder: Path) -> None:
    ranks = cpu_ranks()
    with ExitStack() as stack:
        if ranks.rank == 1:  # its view of the folder is stale
            error = FileNotFoundError(2, "stale")
            for owner, name in [(os, "listdir"), (os, "scandir"), (Path, "iterdir"), (Path, "glob")]:
                stack.enter_context(mock.patch.object(owner, name, side_effect=error))
            stack.enter_context(mock.patch.object(Path, "exists", return_value=False))
        go_through_a_run(folder, ranks)


def go_through_a_run(folder: Path, ranks: Ranks) -> None:
    store = Store(folder / "run" / "checkpoints", ranks)
    for step in [1, 2, 3]:
        store.save(step, state("shard", 2, step), {})
        store.prune(Policy(1))
    newest = store.newest()
    assert newest is not None and newest == find(str(folder / "run"), ranks) == store.all()[0]
    found = state("shard", 2)
    store.load(newest, found)
    assert_holds(found, 3)
    store.write_scores(newest, {"rank": ranks.rank})
    assert store.scores(newest) == {"rank": 0}
    with pytest.raises(Refusal, match="no such folder"):
        find(str(folder / "absent"), ranks)


def test_ranks_that_see_another_listing_neither_hang_nor_fail(tmp_path: Path) -> None:
    run_ranks(2, see_nothing, tmp_path, group=True)


# ---- the test of a restore


def restore(folder: Path) -> list[list[str]]:
    tensors.ROUND_BYTES = 2000  # several rounds, and tensors larger than one
    ranks = cpu_ranks()
    store = Store(folder, ranks)
    live = state("shard", 2, 1) | {"model.odd": torch.tensor([math.nan, -0.0, 0.0, 1.0])}
    saved = store.save(1, live, {"kind": "test"})
    reports = [store.verify_restore(saved, live)]
    if ranks.rank == 1:
        local = live["model.embedding.weight"].to_local()  # type: ignore[attr-defined]
        local.view(torch.int32)[-1, -1] ^= 1  # the last bit of one value
    reports.append(store.verify_restore(saved, live))
    live["model.odd"][1] = 0.0  # -0 and 0 are equal, not the same
    reports.append(store.verify_restore(saved, live))
    assert all(report.seconds > 0 for report in reports)
    return [report.different for report in reports]


def test_a_restore_is_compared_bit_by_bit(tmp_path: Path) -> None:
    first, second = run_ranks(2, restore, tmp_path, group=True)
    assert first == second
    bit = "model.embedding.weight (rank 1)"
    assert first == [[], [bit], ["model.odd (rank 0)", bit, "model.odd (rank 1)"]]


def restore_what_is_lost(folder: Path) -> None:
    store = Store(folder, Ranks.alone())
    live = state("plain", 1, 1)
    saved = store.save(1, live, {})
    with mock.patch.object(tensors, "read"):  # reads nothing
        different = store.verify_restore(saved, live).different
    assert len(different) == len(live)


def test_a_tensor_that_was_not_read_is_seen(tmp_path: Path) -> None:
    run_ranks(1, restore_what_is_lost, tmp_path)


def warn_once(folder: Path) -> int:
    (folder / "step-000003").mkdir(exist_ok=True)
    with mock.patch.object(folders.log, "warning") as warning:
        Store(folder, cpu_ranks()).newest()
    return warning.call_count


def test_only_rank_0_warns(tmp_path: Path) -> None:
    assert run_ranks(2, warn_once, tmp_path, group=True) == [1, 0]
