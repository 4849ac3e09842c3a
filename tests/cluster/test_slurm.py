"""scripts/slurm/train.sbatch on a real Slurm of two nodes: whatever happens to a job, its run gives what the unbroken
one gives. The order counts: the last test loses a node."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.paced import SECONDS
from tests.cluster.slurm import NODES, Cluster, cluster
from tests.resume.same import check_same_bits
from tests.runs.drive import DROPOUT, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 150
RUN = (
    f"{DROPOUT} model.layers=1 ++model.parts.feedforward._target_=tests.cluster.paced.Paced steps={STEPS} evals=none "
    "schedule=constant checkpoint.every=10 checkpoint.keep=1 micro_batch=4"
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """The unbroken run on two ranks."""
    runs.finish("whole", f"{RUN} parallel=ddp", ranks=2)
    return "whole"


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Cluster, runs: Runs) -> str:
    """A job with a limit of a minute, which passes while other tests run."""
    return submit(slurm, runs, "--nodes=2 --time=1 --signal=USR1@1", "parallel=ddp name=limited", paced=0.3)


def submit(slurm: Cluster, runs: Runs, options: str, words: str, paced: float) -> str:
    """The number of the job."""
    environment = f"--export=ALL,PYTHON={sys.executable},OMP_NUM_THREADS=1,{SECONDS}={paced}"
    command = ["sbatch", "--parsable", *options.split(), environment, f"--output={slurm.folder}/%x-%A-%a.out"]
    return slurm.ask(*command, "scripts/slurm/train.sbatch", *runs.words, *RUN.split(), *words.split())


def steps_done(runs: Runs, name: str) -> int:
    path = runs.folder(name) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def log(runs: Runs, name: str) -> str:
    return (runs.folder(name) / "run.log").read_text()


def wait_for_the_end(slurm: Cluster, job: str, seconds: float = 240) -> None:
    slurm.wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "TIMEOUT"), seconds)
    assert slurm.state(job) == "COMPLETED", slurm.told()


def test_cancelled(slurm: Cluster, runs: Runs, whole: str) -> None:
    """It saves, stays away, and goes on when it is submitted again."""
    words = "parallel=ddp name=cancelled checkpoint.every=0"
    job = submit(slurm, runs, "--nodes=2", words, paced=0.3)
    slurm.wait_until(lambda: steps_done(runs, "cancelled") >= 5, 200)
    slurm.ask("scancel", job)
    slurm.wait_until(lambda: slurm.state(job) == "CANCELLED", 60)
    assert slurm.restarts(job) == 0
    status = runs.status("cancelled")
    assert (status["state"], status["message"]) == ("saved", "stopped by SIGTERM"), slurm.told()
    assert runs.checkpoints("cancelled") == [status["step"]]
    wait_for_the_end(slurm, submit(slurm, runs, "--nodes=2", words, paced=0))
    check_same_bits(runs, "cancelled", whole, STEPS)


def test_a_mistake_is_told_before_anything_starts(slurm: Cluster, runs: Runs) -> None:
    job = submit(slurm, runs, "--nodes=2", "parallel=ddp parallel.tp=3 name=mistaken", paced=0)
    slurm.wait_until(lambda: slurm.state(job) == "FAILED", 60)
    told = next(slurm.folder.glob(f"*-{job}-*.out")).read_text()
    assert "Not started: " in told and "parallel.tp" in told
    assert not Path(runs.folder("mistaken")).exists()


def test_a_sweep_as_an_array(slurm: Cluster, runs: Runs) -> None:
    """A task for each value; --signal's USR1 to one of them has it saved and started again."""
    job = submit(slurm, runs, "--array=0-1", "optimizer.lr=0.01,0.005 name=sweep", paced=0.06)
    slurm.wait_until(lambda: steps_done(runs, "sweep-1") >= 5, 200)
    slurm.ask("scancel", "--signal=USR1", f"{job}_1")
    for task in (0, 1):
        wait_for_the_end(slurm, f"{job}_{task}")
        assert slurm.restarts(f"{job}_{task}") == task
        assert ("stopped by SIGUSR1: saved at step" in log(runs, f"sweep-{task}")) is bool(task)
        alone = f"alone-{task}"
        runs.finish(alone, f"{RUN} optimizer.lr={(0.01, 0.005)[task]}")
        check_same_bits(runs, f"sweep-{task}", alone, STEPS)


def test_a_time_limit(slurm: Cluster, runs: Runs, whole: str, limited: str) -> None:
    """Of one minute, known from squeue: saved before it, put back in the queue, and on to the end."""
    wait_for_the_end(slurm, limited)
    assert slurm.restarts(limited) >= 1  # more where the machine is slow to start
    assert "stopped by the end of its Slurm job: saved at step" in log(runs, "limited")
    check_same_bits(runs, "limited", whole, STEPS)


def test_a_lost_node(slurm: Cluster, runs: Runs, whole: str) -> None:
    """All on it is killed at once; when Slurm has noticed and the node is back, the run goes on."""
    job = submit(slurm, runs, "--nodes=2", "parallel=ddp name=lost", paced=0.3)
    slurm.wait_until(lambda: bool(runs.checkpoints("lost")), 200)
    slurm.lose_node(NODES[1])
    slurm.wait_until(lambda: slurm.restarts(job) == 1, 200)
    slurm.start_node(NODES[1])
    wait_for_the_end(slurm, job)
    assert "going on from" in log(runs, "lost")
    check_same_bits(runs, "lost", whole, STEPS)
