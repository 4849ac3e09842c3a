"""Real processes, alone and under torchrun."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.resume.same import check_near, check_same_bits
from tests.runs import processes
from tests.runs.drive import DROPOUT, SAVED, Runs

BEFORE_STEP_2 = """
import os, runpy, sys
from training import loop
def seed_step(seed, step, data_rank):
    if step == 1:
        print("imported:", *sorted(sys.modules))
        sys.stdout.flush()
        os._exit(0)
loop.seed_step = seed_step
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_default_run_imports_little(tmp_path: Path, runs: Runs) -> None:
    """Up to the end of its first step: each of these costs seconds."""
    small = ["model.layers=1", "model.dim=32", "model.heads=2", "model.context=32", "batch_sequences=2"]
    data = [word for word in runs.words if word.startswith("data")]
    words = [*small, *data, "evals.heldout_tokens=300", f"out={tmp_path}"]
    result = processes.finish(processes.start([sys.executable, "-c", BEFORE_STEP_2, *words]))
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.partition("imported: ")[2].split())
    assert {"torch", "training.step"} <= imported
    slow = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo"}
    slow |= {"datasets", "pyarrow", "transformers", "pandas", "torch.utils.tensorboard", "tensorflow"}
    assert imported & slow == set()


def lines(runs: Runs, name: str) -> int:
    """Whole ones, of metrics that may be being written."""
    path = runs.folder(name) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_interrupted_and_killed(runs: Runs) -> None:
    """Ctrl-C, then kill -9, then to the end, against a run that was not broken."""
    broken = f"{DROPOUT} steps=300 checkpoint.every=20 evals=none schedule=constant checkpoint.keep=1"
    command = [sys.executable, "train.py", *runs.words, *broken.split(), "name=process"]
    process = processes.start(command)
    processes.wait_until(lambda: lines(runs, "process") >= 30, process)
    os.killpg(process.pid, signal.SIGINT)
    result = processes.finish(process)
    assert result.returncode == SAVED and "Traceback" not in result.stderr, result
    assert runs.status("process")["state"] == "saved" and runs.status("process")["command"] in result.stdout
    reached = runs.checkpoints("process")[-1]
    process = processes.start(command)
    processes.wait_until(lambda: runs.checkpoints("process")[-1:] > [reached], process)
    processes.kill(process)
    assert runs.status("process")["state"] == "running"  # nobody could say otherwise
    result = processes.finish(processes.start(command))
    assert result.returncode == 0, result.stderr
    runs.finish("not-broken", broken)
    check_same_bits(runs, "process", "not-broken", 300)


@pytest.mark.slow
def test_two_torchruns_at_once(runs: Runs) -> None:
    """With 2 and with 4 ranks, on one machine; both give what one device gives."""
    exact = "precision=fp64 micro_batch=1"
    words = [*runs.words, *exact.split()]
    two = processes.start([*processes.TORCHRUN, "2", "train.py", *words, "parallel=fsdp2", "name=two"])
    four = processes.start(
        [*processes.TORCHRUN, "4", "train.py", *words, "parallel=hsdp", "parallel.dp_shard=2", "name=four"]
    )
    for process in (two, four):
        result = processes.finish(process)
        assert result.returncode == 0, result.stderr
    runs.finish("one", exact)
    for name in ("two", "four"):
        assert runs.status(name)["state"] == "finished"
        check_near(runs, name, "one", relative=1e-9, state=1e-8)


@pytest.mark.slow
def test_torchrun_stopped_and_resumed_on_more_ranks(runs: Runs) -> None:
    words = [
        *runs.words,
        "steps=400",
        "checkpoint.every=0",
        "evals=none",
        "schedule=constant",
        "micro_batch=1",
        "name=job",
    ]
    process = processes.start([*processes.TORCHRUN, "2", "train.py", *words, "parallel=fsdp2"])
    processes.wait_until(lambda: lines(runs, "job") >= 10, process)
    process.send_signal(signal.SIGTERM)  # to torchrun alone, as a scheduler does
    processes.finish(process)
    status = runs.status("job")
    assert (status["state"], status["exit_code"]) == ("saved", 0)
    assert status["command"].startswith("torchrun --standalone --nproc-per-node 2 train.py")
    assert runs.checkpoints("job") == [status["step"]]
    last = ["max_minutes=1", "parallel=ddp"]
    result = processes.finish(processes.start([*processes.TORCHRUN, "4", "train.py", *words, *last]))
    assert result.returncode == 0, result.stderr
    steps = [line["step"] for line in runs.records("job")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > status["step"]


@pytest.mark.slow
def test_torchrun_names_the_rank_that_failed(runs: Runs) -> None:
    words = [*runs.words, "parallel=ddp", "name=failing"]
    command = [*processes.TORCHRUN, "2", "-m", "tests.runs.failing_rank", *words]
    result = processes.finish(processes.start(command))
    assert result.returncode == 1
    summary = result.stderr.rpartition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank\s*: 1 ", summary) and "a shape is wrong" in summary, result.stderr
    assert "a shape is wrong" in (runs.folder("failing") / "run.rank1.log").read_text()
    assert runs.status("failing")["state"] == "failed"
    assert runs.status("failing")["message"] == "rank 1: RuntimeError: a shape is wrong"
    assert runs.records("failing")[-1]["step"] == 2


@pytest.mark.slow
def test_torchrun_refuses_once(runs: Runs) -> None:
    result = processes.finish(
        processes.start([*processes.TORCHRUN, "2", "train.py", "optimizer.lrr=1", "parallel=ddp"])
    )
    assert result.returncode != 0
    assert result.stderr.count("Not started: 1 problem") == 1
    assert "optimizer.lr" in result.stderr
