"""Saved in any layout, loaded into any other: every tensor comes back bitwise."""

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.checkpoint.states import assert_holds, cpu_ranks, state, whole
from training.checkpoint.store import Store
from training.ranks import Ranks

LAYOUTS = {1: ["plain", "shard"], 2: ["plain", "shard"], 3: ["shard"], 4: ["shard", "hybrid"]}
CASES = [(layout, ranks) for ranks, layouts in LAYOUTS.items() for layout in layouts]


def save_all(folder: Path) -> None:
    ranks = cpu_ranks()
    for layout in LAYOUTS[ranks.size]:
        store = Store(folder / f"{layout}-{ranks.size}", ranks)
        for version in [1, 2]:  # nothing of the first may be kept for the second
            store.save(version, state(layout, ranks.size, version), {})


def load_all(folder: Path) -> None:
    ranks = cpu_ranks()
    for layout in LAYOUTS[ranks.size]:
        for saved_layout, saved_ranks in CASES:
            store = Store(folder / f"{saved_layout}-{saved_ranks}", ranks)
            for saved in store.all():
                found = state(layout, ranks.size)
                store.load(saved, found)
                assert_holds(found, saved.step)


@pytest.fixture(scope="module")
def saved_in_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for ranks in LAYOUTS:
        run_ranks(ranks, save_all, folder, group=True)
    return folder


@pytest.mark.parametrize("ranks", list(LAYOUTS))
def test_any_layout_loads_what_any_other_saved(saved_in_all: Path, ranks: int) -> None:
    run_ranks(ranks, load_all, saved_in_all, group=True)


def load_alone(folder: Path) -> None:
    for layout, ranks in CASES:
        store = Store(folder / f"{layout}-{ranks}", Ranks.alone())
        found = state("plain", 1)
        saved = store.newest()
        assert saved is not None
        store.load(saved, found)
        assert_holds(found, 2)


def test_a_process_without_a_group_loads_them_all(saved_in_all: Path) -> None:
    run_ranks(1, load_alone, saved_in_all)


def save_alone(folder: Path) -> None:
    Store(folder, Ranks.alone()).save(1, state("plain", 1, 1), {})


def load_spread(folder: Path) -> None:
    ranks = cpu_ranks()
    found = state("shard", ranks.size)
    Store(folder, ranks).load(Store(folder, ranks).all()[0], found)
    assert_holds(found, 1)


def test_ranks_load_what_one_process_without_a_group_saved(tmp_path: Path) -> None:
    run_ranks(1, save_alone, tmp_path)
    run_ranks(3, load_spread, tmp_path, group=True)


def make_model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(34, 67), torch.nn.Linear(67, 3, bias=False))


def train_and_save(folder: Path) -> dict[str, torch.Tensor]:
    """A model under FSDP2, one step of AdamW, saved; returns the whole values."""
    from torch.distributed.fsdp import fully_shard

    ranks = cpu_ranks()
    model = make_model(0)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((4, 34), ranks.rank + 1.0)).square().sum().backward()
    optimizer.step()
    state = fsdp_state(model, optimizer)
    Store(folder, ranks).save(1, state, {})
    return {name: whole(tensor).detach() for name, tensor in state.items()}


def fsdp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def load_into_plain(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    store = Store(folder, Ranks.alone())
    store.load(store.all()[0], found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_model_and_optimizer_under_fsdp2_load_into_one_process(tmp_path: Path) -> None:
    expected = run_ranks(4, train_and_save, tmp_path, group=True)
    assert "optimizer.0.weight.exp_avg" in expected[0]
    run_ranks(1, load_into_plain, tmp_path, expected[0])
