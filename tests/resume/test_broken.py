"""Promise 2: killed at any instant, a run that goes on gives what the unbroken run gives, bit for bit."""

import os
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.resume.same import check_near, check_same_bits, check_steps
from tests.runs.drive import (
    DROPOUT,
    REFUSED,
    SAVED,
    Meddling,
    Runs,
    hit_before,
    hit_in_call,
    hit_in_evaluation,
    hit_in_step,
)

KILL, TERM, INT, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1

# What a run is killed in the midst of, and the checkpoints that are whole then. One is saved after each third step.
KILLED: dict[str, tuple[Meddling, list[int]]] = {
    "in step 1": (partial(hit_in_step, 1, KILL), []),
    "in step 5": (partial(hit_in_step, 5, KILL), [3]),
    "in step 7 after a checkpoint": (partial(hit_in_step, 7, KILL), [3, 6]),
    "tensors without an index": (partial(hit_before, ".metadata", KILL, 2), [3]),
    "tensors without a manifest": (partial(hit_before, "manifest.json", KILL, 2), [3]),
    "without the marker": (partial(hit_before, "COMPLETE", KILL, 2), [3]),
    "the first without the marker": (partial(hit_before, "COMPLETE", KILL, 1), []),
    "the last without the marker": (partial(hit_before, "COMPLETE", KILL, 4), [3, 6, 9]),
    "scoring": (partial(hit_in_evaluation, 2, KILL), [3]),
    "scores in no file": (partial(hit_before, "evals.jsonl", KILL, 2), [3, 6]),
    "scores not beside the checkpoint": (partial(hit_before, "scores.json", KILL, 2), [3, 6]),
    "finished but for the status": (partial(hit_before, "status.json", KILL, 6), [3, 6, 9, 12]),
}


SIMILAR = {"in step 7 after a checkpoint", "tensors without a manifest", "the first without the marker"}


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=pytest.mark.slow if name in SIMILAR else ()) for name in KILLED]
)
def test_killed(runs: Runs, whole: str, moment: str) -> None:
    meddle, checkpoints = KILLED[moment]
    name = f"killed {moment}".replace(" ", "-")
    runs.die(name, DROPOUT, meddle)
    assert runs.checkpoints(name) == checkpoints
    runs.finish(name, DROPOUT)
    check_steps(runs, name, whole)
    check_same_bits(runs, name, whole)


def test_killed_while_an_old_checkpoint_is_deleted(runs: Runs, whole: str) -> None:
    name = "killed-while-deleting"
    runs.die(name, f"{DROPOUT} checkpoint.keep=1", partial(hit_in_call, "shutil", "rmtree", KILL))
    assert runs.checkpoints(name) == [6]
    assert runs.checkpoint(name, 3).exists()  # without its marker
    runs.finish(name, f"{DROPOUT} checkpoint.keep=1")
    check_same_bits(runs, name, whole)
    assert not runs.checkpoint(name, 3).exists()


def kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), KILL))
    timer.daemon = True
    timer.start()


def test_killed_at_random_moments(runs: Runs, whole: str) -> None:
    """Again and again, by a clock."""
    chance, killed = random.Random(7), 0
    for _ in range(6):
        if not runs.is_killed("random", DROPOUT, partial(kill_after, chance.uniform(0.2, 0.9))):
            break
        killed += 1
    assert killed > 0
    runs.finish("random", DROPOUT)
    check_same_bits(runs, "random", whole)


@pytest.mark.parametrize(
    "name",
    [
        "__1_0.distcp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("__0_0.distcp", ".metadata", "manifest.json", "COMPLETE")
        ),
    ],
)
def test_one_wrong_bit_in_the_newest_checkpoint(runs: Runs, whole_of_two: str, name: str) -> None:
    """It is named, and all ranks go on from the one before."""
    run = f"flipped-{name}"
    runs.start(run, "parallel=fsdp2", partial(hit_in_step, 7, TERM), ranks=2)
    newest = runs.checkpoints(run)[-1]
    assert newest in (7, 8)
    flip_a_bit(runs.checkpoint(run, newest) / name)
    said = runs.finish(run, "parallel=fsdp2", ranks=2)
    assert (
        re.search(rf"step-{newest:06d} is not used: .*{name}", said)
        and f"going on from {runs.checkpoint(run, 6)}" in said
    )
    check_steps(runs, run, whole_of_two)
    check_same_bits(runs, run, whole_of_two)


@pytest.fixture(scope="session")
def whole_of_two(runs: Runs) -> str:
    runs.finish("whole-of-two", "parallel=fsdp2", ranks=2)
    return "whole-of-two"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(runs: Runs) -> None:
    runs.start("all-damaged", DROPOUT, partial(hit_in_step, 7, TERM))
    for step in (3, 6, 7):
        flip_a_bit(runs.checkpoint("all-damaged", step) / "__0_0.distcp")
    before = runs.records("all-damaged")
    for _ in range(2):
        outcome = runs.start("all-damaged", DROPOUT)[0]
        assert outcome.code == REFUSED and "checkpoint.dir" in outcome.said
        assert runs.records("all-damaged") == before
    assert "step-000006 is not used: it was found damaged: __0_0.distcp" in outcome.said


def test_a_torn_last_line_of_the_metrics(runs: Runs, whole: str) -> None:
    """As a machine leaves it that loses power while it writes."""
    runs.die("torn", DROPOUT, partial(hit_in_step, 9, KILL))
    with open(runs.folder("torn") / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "loss": 3.')
    runs.finish("torn", DROPOUT)
    check_same_bits(runs, "torn", whole)


# What a run is asked to stop in the midst of, by which signal; the checkpoints then, and the steps in the metrics.
STOPPED: dict[str, tuple[Meddling, signal.Signals, list[int]]] = {
    "step 1": (partial(hit_in_step, 1, TERM), TERM, []),
    "step 5": (partial(hit_in_step, 5, TERM), TERM, [3, 5]),
    "step 6 that has a checkpoint": (partial(hit_in_step, 6, INT), INT, [3, 6]),
    "the last step": (partial(hit_in_step, 12, USR1), USR1, [3, 6, 9, 12]),
    "a save": (partial(hit_before, "manifest.json", TERM, 2), TERM, [3, 6]),
    "scoring": (partial(hit_in_evaluation, 2, USR1), USR1, [3]),
    "preparing the data": (partial(hit_in_call, "training.build", "prepare", INT), INT, []),
}


@pytest.mark.parametrize("moment", STOPPED)
def test_stopped_by_a_signal(runs: Runs, whole: str, moment: str) -> None:
    meddle, number, checkpoints = STOPPED[moment]
    name = f"stopped in {moment}".replace(" ", "-")
    outcome = runs.start(name, DROPOUT, meddle)[0]
    assert outcome.code == SAVED
    assert runs.checkpoints(name) == checkpoints
    status = runs.status(name)
    assert (status["state"], status["exit_code"], status["step"]) == ("saved", SAVED, max(checkpoints, default=0))
    assert number.name in outcome.said
    assert f"name={name}" in status["command"] and status["command"] in outcome.said
    runs.finish(name, DROPOUT)
    check_steps(runs, name, whole)
    check_same_bits(runs, name, whole)


def test_a_signal_while_it_reads_its_checkpoint(runs: Runs, copy: str, whole: str) -> None:
    (runs.checkpoint(copy, 12) / "COMPLETE").unlink()
    outcome = runs.start(copy, DROPOUT, partial(hit_in_call, "training.checkpoint.tensors", "read", TERM))[0]
    assert outcome.code == SAVED
    status = runs.status(copy)
    assert (status["state"], status["step"], status["checkpoint"]) == ("saved", 9, 9)
    assert runs.checkpoints(copy) == [3, 6, 9]
    runs.finish(copy, DROPOUT)
    check_same_bits(runs, copy, whole)


def test_what_a_signal_saved_has_no_scores(runs: Runs) -> None:
    runs.start("unscored", DROPOUT, partial(hit_in_step, 5, TERM))
    assert not (runs.checkpoint("unscored", 5) / "scores.json").exists()
    assert (runs.checkpoint("unscored", 3) / "scores.json").exists()
    assert {line["step"] for line in runs.evals("unscored")} == {3}


def test_a_limit_of_time(runs: Runs, whole: str) -> None:
    """Each start does one step, which is later than the limit; three of them."""
    for step in (1, 2, 3):
        assert runs.start("limited", f"{DROPOUT} max_minutes=0.0001")[0].code == SAVED
        assert runs.checkpoints("limited")[-1] == step
        assert [line["step"] for line in runs.records("limited")] == list(range(1, step + 1))
    assert "max_minutes" in runs.status("limited")["message"]
    runs.finish("limited", DROPOUT)
    check_steps(runs, "limited", whole)
    check_same_bits(runs, "limited", whole)


def in_a_slurm_job(seconds: float) -> None:
    """That ends so soon."""
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + seconds))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_end_of_a_slurm_job(runs: Runs, ranks: int) -> None:
    """Known to one rank, it stops all, as early as a machine's notice would be; with a far end the run is finished."""
    name, words = f"slurm-{ranks}", f"{DROPOUT} steps=6 evals=none checkpoint.every=0" + " parallel=ddp" * (ranks > 1)
    outcomes = runs.start(name, f"{words} checkpoint.grace_seconds=100", partial(in_a_slurm_job, 90), ranks=ranks)
    assert [outcome.code for outcome in outcomes] == ([SAVED] if ranks == 1 else [0, 0])
    status = runs.status(name)
    assert (status["state"], status["message"]) == ("saved", "stopped by the end of its Slurm job")
    assert runs.checkpoints(name) == [status["step"]] == [ranks]  # with several ranks one step later
    runs.finish(name, words, partial(in_a_slurm_job, 3600 * 24 * 365), ranks=ranks)


def test_a_save_that_takes_longer_than_the_notice_is_warned_of(runs: Runs) -> None:
    said = runs.finish("short-notice", f"{DROPOUT} checkpoint.grace_seconds=0")
    assert said.count("warning: saving step 3 took") == said.count("warning: saving step") == 1
    assert "warning: saving" not in runs.finish("long-notice", DROPOUT)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_ranks_killed_and_stopped(runs: Runs, parallel: str) -> None:
    """On the same layout bit for bit, with dropout, since each rank's random numbers are its own and derived."""
    overrides = f"{DROPOUT} parallel={parallel}"
    runs.finish(f"whole-{parallel}", overrides, ranks=2)
    name = f"broken-{parallel}"
    runs.die(name, overrides, partial(hit_in_step, 5, KILL), ranks=2)
    outcomes = runs.start(name, overrides, partial(hit_in_step, 7, TERM, 1), ranks=2)  # to one rank only
    assert [outcome.code for outcome in outcomes] == [0, 0]  # another code would make torchrun restart it
    assert runs.status(name)["state"] == "saved"
    assert runs.checkpoints(name) in ([3, 6, 7], [3, 6, 8])  # all stop together, at once or one step later
    runs.finish(name, overrides, ranks=2)
    check_steps(runs, name, f"whole-{parallel}")
    check_same_bits(runs, name, f"whole-{parallel}")


@pytest.mark.slow
def test_other_layouts_and_numbers_of_ranks(runs: Runs) -> None:
    """One run that moves from one device to two ranks, to four, to others, and back. In float64, where what is more
    than rounding shows."""
    exact = "precision=fp64"
    runs.finish("whole-exact", exact)
    runs.start("moved", exact, partial(hit_in_step, 2, TERM))
    runs.die("moved", f"{exact} parallel=fsdp2", partial(hit_in_step, 5, KILL), ranks=2)
    runs.start("moved", f"{exact} parallel=ddp micro_batch=1", partial(hit_in_step, 6, TERM), ranks=4)
    runs.start("moved", f"{exact} parallel=hsdp parallel.dp_replicate=2", partial(hit_in_step, 9, TERM), ranks=4)
    runs.finish("moved", f"{exact} micro_batch=4")
    check_steps(runs, "moved", "whole-exact")
    check_near(runs, "moved", "whole-exact", relative=1e-9, state=1e-8)


@pytest.mark.slow
def test_experts(runs: Runs) -> None:
    """Loads and biases go on where they were: bit for bit on one layout, within rounding on another."""
    base = f"{DROPOUT} model.moe.experts=5 model.moe.dense_layers=1 model.moe.balance=step model.moe.bias_rate=0.01"
    runs.finish("whole-experts", base)
    runs.die("experts", base, partial(hit_in_step, 5, KILL))
    runs.finish("experts", base)
    check_steps(runs, "experts", "whole-experts")
    check_same_bits(runs, "experts", "whole-experts")
    state = runs.state("experts", 12)
    assert state["model.blocks.1.feedforward.router.load"].sum() == 8 * 32 * 2
    assert state["model.blocks.1.feedforward.router.bias"].any()
    assert not [name for name in state if name.startswith("optimizer.") and "router" in name and "weight" not in name]

    exact = f"precision=fp64 {base.removeprefix(DROPOUT)}"
    runs.finish("whole-experts-exact", exact)
    runs.start("experts-moved", exact, partial(hit_in_step, 4, TERM))
    runs.start("experts-moved", f"{exact} parallel=fsdp2", partial(hit_in_step, 8, TERM), ranks=2)
    runs.finish("experts-moved", f"{exact} micro_batch=4")
    check_near(runs, "experts-moved", "whole-experts-exact", relative=1e-9, state=1e-8)
