"""What is written in the background is the state of when the save began, and the files are those of any other save."""

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.checkpoint.states import assert_holds, full, state, whole
from training.checkpoint import tensors
from training.checkpoint.background import Background
from training.checkpoint.folders import Saved
from training.checkpoint.store import Store
from training.ranks import Ranks

pytestmark = pytest.mark.torch211


def new_ranks(count: int) -> Ranks:
    import torch.distributed as dist

    return Ranks(dist.new_group(backend="gloo")) if count > 1 else Ranks.alone()  # type: ignore[arg-type]


def change_at_once(folder: Path, count: int, layout: str) -> None:
    """Two saves one after the other, each of tensors that change before a byte is written."""
    store, background = Store(folder, new_ranks(count)), Background(new_ranks(count), torch.device("cpu"))
    own, changed, real = Store(folder, background.ranks), threading.Event(), tensors.write
    live = state(layout, count)

    def late(*args: Any) -> Any:
        assert changed.wait(10) and threading.current_thread() is not threading.main_thread()
        return real(*args)

    tensors.write = late  # type: ignore[assignment]
    for version in (0, 1):
        changed.clear()
        copied = background.copy(live)
        background.start(partial(own.save, version, copied, {}))
        for tensor in live.values():  # a step of the run, which also meets the other ranks
            tensor.copy_(full_as(tensor, live, version + 1))
        store.ranks.barrier()
        changed.set()
        assert isinstance(background.wait(), Saved) and background.ended == version + 1
    tensors.write = real
    assert_holds(live, 2)
    for version, saved in enumerate(store.all()):
        fresh = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
        store.load(saved, fresh)
        assert_holds(fresh, version)


def full_as(tensor: torch.Tensor, live: dict[str, torch.Tensor], version: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = full(next(name for name, other in live.items() if other is tensor), version)
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


@pytest.mark.parametrize(("count", "layout"), [(1, "plain"), (2, "plain"), (2, "shard"), (2, "hybrid")])
def test_tensors_that_change_at_once(tmp_path: Path, count: int, layout: str) -> None:
    run_ranks(count, change_at_once, tmp_path, count, layout, group=count > 1)


def same_files(folder: Path, count: int, layout: str) -> None:
    live, ranks = state(layout, count), new_ranks(count)
    background = Background(new_ranks(count), torch.device("cpu"))
    Store(folder / "now", ranks).save(1, live, {})
    copied = background.copy(live)
    background.start(lambda: Store(folder / "later", background.ranks).save(1, copied, {}))
    assert isinstance(background.wait(), Saved)


@pytest.mark.parametrize(("count", "layout"), [(1, "plain"), (2, "plain"), (2, "shard"), (2, "hybrid")])
def test_the_files_are_bitwise_those_of_a_save_that_is_waited_for(tmp_path: Path, count: int, layout: str) -> None:
    run_ranks(count, same_files, tmp_path, count, layout, group=count > 1)
    now, later = (tmp_path / name / "step-000001" for name in ("now", "later"))
    files = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (now, later)]
    assert files[0] == files[1] and len(files[0]) == count + 1
    for name in files[0]:
        assert (now / name).read_bytes() == (later / name).read_bytes()


def leave_early(folder: Path) -> float:
    background, may_end = Background(Ranks.alone(), torch.device("cpu")), threading.Event()

    def save() -> Saved:
        may_end.wait(30)
        raise OSError

    background.start(save)
    began = time.perf_counter()
    background.leave(0.2)
    assert background.writes
    may_end.set()
    background.leave(20)
    assert not background.writes
    return time.perf_counter() - began


def test_who_leaves_waits_no_longer_than_he_must(tmp_path: Path) -> None:
    assert 0.2 < run_ranks(1, leave_early, tmp_path)[0] < 5


def test_the_copy_is_complete_when_it_returns() -> None:
    """Also of a state that is one memory with several views, as flat optimizers have."""
    flat = torch.arange(8.0)
    live = {"a": flat[:3], "b": flat[3:].view(5, 1), "step": torch.tensor(3.0)}
    copied = Background(Ranks.alone(), torch.device("cpu")).copy(live)
    flat.zero_()
    live["step"].fill_(9)
    assert whole(copied["a"]).tolist() == [0, 1, 2] and copied["b"].shape == (5, 1)
    assert copied["b"].flatten().tolist() == [3, 4, 5, 6, 7] and copied["step"].item() == 3
