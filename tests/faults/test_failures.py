"""A run that fails: what it says, where, and what is left."""

import contextlib
import os
import resource
from functools import partial
from typing import Any

import pytest

from tests.ranks import RanksFailed
from tests.runs.drive import DROPOUT, FAILED, Runs, put


def fail_in_step(step: int, rank: int, kind: str) -> None:
    """One rank's forward pass raises."""
    from parallel.apply import Spread
    from training import loop

    real_forward, real_seed, now = Spread.forward, loop.seed_step, 0

    def seed_step(seed: int, done: int, data_rank: int) -> None:
        nonlocal now
        now = done + 1
        real_seed(seed, done, data_rank)

    def forward(self: Spread, **inputs: Any) -> Any:
        if now == step and self.model.training and rank == int(os.environ.get("RANK", "0")):
            import torch

            raise (
                torch.OutOfMemoryError("CUDA out of memory.") if kind == "memory" else RuntimeError("a shape is wrong")
            )
        return real_forward(self, **inputs)

    put(loop, "seed_step", seed_step)
    put(Spread, "forward", forward)


def test_a_bug_leaves_its_traceback(runs: Runs) -> None:
    """One of ours is no user's mistake: the exception comes out, and stands with the step in the log."""
    outcome = runs.start("bug", DROPOUT, partial(fail_in_step, 5, 0, "bug"))[0]
    assert outcome.error == "RuntimeError: a shape is wrong"
    status, log = runs.status("bug"), (runs.folder("bug") / "run.log").read_text()
    assert (status["state"], status["exit_code"]) == ("failed", FAILED)
    assert (status["step"], status["checkpoint"]) == (4, 3)
    assert status["message"] == "rank 0: RuntimeError: a shape is wrong"
    assert "Traceback" in log and "after step 4 and before the end of step 5" in log
    assert [line["step"] for line in runs.records("bug")] == [1, 2, 3, 4]
    assert runs.checkpoints("bug") == [3]
    runs.finish("bug", DROPOUT)


def test_out_of_memory_as_cuda_says_it(runs: Runs) -> None:
    outcome = runs.start("memory", DROPOUT, partial(fail_in_step, 5, 0, "memory"))[0]
    assert outcome.code == FAILED
    check_report(outcome.said)
    assert runs.status("memory")["state"] == "failed"


def check_report(said: str) -> None:
    assert "out of memory on rank 0" in said and "in the forward pass" in said
    assert all(part in said for part in ("weights", "gradients", "optimizer", "activations"))
    ways = [line.strip() for line in said.partition("instead, one of:")[2].splitlines() if line.startswith("    ")]
    assert len(ways) == 3 and ways[0].startswith("micro_batch=1:"), said
    assert ways[1].startswith("activations=full:"), said
    assert "Traceback" not in said


def limit_memory(more_mib: int) -> None:
    """From the first forward pass on this process gets no more than so much memory."""
    from training.step import Step

    real = Step.backward

    def backward(self: Step, *args: Any) -> Any:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (more_mib << 20), resource.RLIM_INFINITY))
        return real(self, *args)

    put(Step, "backward", backward)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's account of memory")
def test_out_of_memory_on_a_cpu(runs: Runs) -> None:
    """A real one: the allocator fails in the forward pass."""
    large = "batch_sequences=1024 micro_batch=1024"
    outcome = runs.start("memory-cpu", large, partial(limit_memory, 16))[0]
    assert outcome.code == FAILED
    assert "out of memory on rank 0" in outcome.said and "micro_batch=512" in outcome.said, outcome
    assert "Traceback" not in outcome.said
    runs.finish(
        "memory-cpu", f"{large} steps=3 schedule.warmup_steps=1", partial(limit_memory, 4096)
    )  # enough is enough


def test_a_failing_rank_is_named(runs: Runs) -> None:
    """Rank 1's reason is the one that is told, though rank 0 fails as well, later and because of it."""
    name, overrides = "rank-1", f"{DROPOUT} parallel=ddp parallel.timeout_seconds=2"
    with contextlib.suppress(RanksFailed):  # rank 0 may still wait for rank 1; torchrun would end it
        runs.start(name, overrides, partial(fail_in_step, 5, 1, "bug"), ranks=2)
    status, log = runs.status(name), (runs.folder(name) / "run.rank1.log").read_text()
    assert status["state"] == "failed" and status["message"] == "rank 1: RuntimeError: a shape is wrong"
    assert "on rank 1, after step 4 and before the end of step 5" in log
    runs.finish(name, overrides, ranks=2)


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "single"), (2, "fsdp2")])
def test_micro_batch_auto(runs: Runs, ranks: int, parallel: str) -> None:
    """A tiny model fits whole; and what was tried before the run leaves no trace in it."""
    name = f"auto-{parallel}"
    said = runs.finish(name, f"parallel={parallel} micro_batch=auto", ranks=ranks)
    size = 8 // ranks
    assert f"micro_batch=auto: {size} of the {size} sequences" in said
    runs.finish(f"{name}-given", f"parallel={parallel} micro_batch={size}", ranks=ranks)
    assert runs.records(name) == runs.records(f"{name}-given")
    assert f"micro_batch: {size}\n" in (runs.folder(name) / "config.yaml").read_text()


def multiply_wrongly(rank: int) -> None:
    """One rank's device."""
    from training import health

    real = health.multiply
    if rank == int(os.environ.get("RANK", "0")):
        put(health, "multiply", lambda a, b: real(a, b) + 1)


def test_a_bad_host_is_named_before_the_first_step(runs: Runs) -> None:
    words = "hardware.health_check=always parallel=ddp"
    outcomes = runs.start("bad-host", words, partial(multiply_wrongly, 1), ranks=2)
    assert all("rank 1 (CPU): a matrix product is wrong" in outcome.error for outcome in outcomes)
    assert "a matrix product is wrong" in runs.status("bad-host")["message"]
    assert runs.records("bad-host") == []
    assert "health check: matrix product" in runs.finish("bad-host", words, ranks=2)
