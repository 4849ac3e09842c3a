"""The harness itself: what it returns, and what it shows when a rank raises, dies or hangs."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks
from tests.ranks import ROOT, RanksFailed, run_ranks, start, stop


def environment(names: list[str]) -> list[str]:
    return [os.environ[name] for name in names]


def all_reduce(scale: float) -> tuple[float, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads()


def sharded_step() -> float:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(4, 8)).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    return float(grad.full_tensor().sum())  # type: ignore[attr-defined]


def own_group_and_early_end() -> int:
    """Rank 0 holds the store and is the first to be ready."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank > 0:
        time.sleep(0.5)
        dist.distributed_c10d._get_default_store().set(f"late{rank}", "1")
    return rank


def draw() -> float:
    return random.random()


def fail_on_second() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the second is wrong")
    dist.all_reduce(torch.ones(1))


def wrong_sum() -> None:
    left, right = 3, 4
    assert left + 1 == right + 1


def die_on_second() -> None:
    if os.environ["RANK"] == "1":
        print("just before", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_on_first() -> None:
    if os.environ["RANK"] == "0":
        os._exit(0)


def hang_somewhere() -> None:
    if os.environ["RANK"] == "0":
        wait_for_nobody()


def wait_for_nobody() -> None:
    time.sleep(60)


def hang_with_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def unpicklable() -> object:
    return lambda: None


def test_each_rank_returns_its_own_under_the_names_of_torchrun() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    assert run_ranks(3, environment, names) == [[str(r), "3", str(r), "3", "127.0.0.1"] for r in range(3)]


def test_environment_and_folder_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start()
    monkeypatch.setenv("ONLY_HERE", "7")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, environment, ["ONLY_HERE"]) == [["7"]]
    assert run_ranks(1, os.getcwd) == [str(tmp_path)]


def test_collectives_with_the_parent_computing_on_threads_before() -> None:
    """Threads of the caller, OpenMP's and autograd's, must not matter: the ranks are not its forks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.ones(512, 512, requires_grad=True)
    (x @ x).sum().backward()
    assert run_ranks(4, all_reduce, 2.0, group=True) == [(20.0, 1)] * 4
    assert run_ranks(2, sharded_step, group=True) == [8 * 8 * 4 * 2 / 2] * 2  # averaged over ranks
    torch.set_num_threads(before)


def test_the_server_has_one_thread() -> None:
    run_ranks(1, draw)
    threads = Path(f"/proc/{start().process.pid}/task")
    if not threads.exists():
        pytest.skip("no /proc here")
    assert len(list(threads.iterdir())) == 1


def test_the_store_outlives_the_first_rank() -> None:
    assert run_ranks(3, own_group_and_early_end) == [0, 1, 2]


def test_ranks_differ_in_their_random_states_and_calls_do_not() -> None:
    first = run_ranks(3, draw)
    assert len(set(first)) == 3
    assert run_ranks(3, draw) == first


def test_a_call_costs_little() -> None:
    run_ranks(1, draw)
    began = time.monotonic()
    run_ranks(2, draw)
    assert time.monotonic() - began < 5  # a process that imports takes 10 and more


def test_the_first_to_raise_is_shown_first() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 of 2: Traceback.*the second is wrong.*rank 0 of 2") as failed:
        run_ranks(2, fail_on_second, group=True, timeout=30)
    assert failed.value.first == 1


def test_an_assertion_shows_its_variables() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)assert left \+ 1 == right \+ 1.*left = 3\n    right = 4"):
        run_ranks(1, wrong_sum)


def test_a_death_is_named_with_its_last_output_and_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 of 2: died of SIGKILL.*just before") as failed:
        run_ranks(2, die_on_second, timeout=50)
    assert failed.value.first == 1
    assert time.monotonic() - began < 30


def test_an_exit_without_return_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 of 2: ended with code 0 before it returned(?s:.*)returned: \[1\]"):
        run_ranks(2, leave_on_first)


def test_a_hang_shows_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)^rank 0 of 2.*in wait_for_nobody.*in hang_somewhere.*returned: \[1\]"):
        run_ranks(2, hang_somewhere, timeout=5)


def test_nothing_lives_on_after_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(1, hang_with_a_child, str(tmp_path / "pids"), timeout=5)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert ended(pid)


@pytest.fixture
def light_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the shared server one that imports nothing and can be ended."""
    monkeypatch.setattr(ranks, "_server", None)
    monkeypatch.setattr(ranks, "IMPORTS", [])
    yield
    stop()


def test_nothing_lives_on_after_an_interrupt(light_server: None, tmp_path: Path) -> None:
    """An interrupt of the caller ends the ranks at once; the next call has a new server."""
    interrupt = f"until [ -s {tmp_path / 'pids'} ]; do sleep 0.1; done; kill -INT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", interrupt]), pytest.raises(KeyboardInterrupt):
        run_ranks(1, hang_with_a_child, str(tmp_path / "pids"), timeout=50)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert ended(pid)
    assert run_ranks(2, environment, ["RANK"]) == [["0"], ["1"]]


def ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process is gone, or is but waiting for its parent to notice."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not found or found.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_a_result_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(1, unpicklable)


def test_a_server_that_is_gone_is_told_and_replaced(light_server: None) -> None:
    start().process.kill()
    with pytest.raises(RuntimeError, match="the server of ranks is gone"):
        run_ranks(1, draw)
    assert run_ranks(2, environment, ["RANK"]) == [["0"], ["1"]]


def test_the_server_ends_with_its_parent() -> None:
    script = "import os; from tests import ranks; ranks.IMPORTS.clear(); print(ranks.start().process.pid, flush=True)"
    command = [sys.executable, "-c", script + "; os._exit(0)"]
    pid = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert ended(pid, 60)
