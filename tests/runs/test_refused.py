"""Bad input, as a user gives it to train.py: refused with 2 in a second or two, all of it at once."""

import resource
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.runs import processes
from tests.runs.drive import REFUSED, Runs, put, train_py

# What was typed, and what has to be said.
BAD: dict[str, list[str]] = {
    "optimizer.lrr=1": ["optimizer.lrr", "optimizer.lr"],
    "+optimizer.lrr=1": ["optimizer.lrr", "optimizer.lr"],
    "modle=gpt2_124m": ["modle", "model"],
    "steps=None": ["steps", "null"],
    "parallel=fsdp2 parallel.dp_shard=3 hardware.gpus=8 check_only=true": ["dp_shard", "3", "8"],
    "steps=abc": ["steps", "abc"],
    "optimizer.lr=inf": ["optimizer.lr", "inf"],
    "parallel=fsdp3": ["fsdp3", "fsdp2"],
    "steps": ["steps", "="],
    "steps=10 tokens=1000": ["steps", "tokens"],
    "batch_sequences=30 micro_batch=31": ["micro_batch", "15", "30"],
    "parallel=single hardware.gpus=2 check_only=true": ["single", "fsdp2"],
    "model.dim=30 model.heads=4": ["model.heads"],
    "eval_only=true": ["checkpoint.load"],
    "--config-dir=/no/such/folder steps=1": ["/no/such/folder"],
    "--no-such-flag": ["no-such-flag"],
}


@pytest.mark.parametrize("typed", BAD)
def test_refused(typed: str) -> None:
    outcome = train_py(typed.split())[0]
    assert (outcome.code, outcome.error) == (REFUSED, ""), outcome
    assert "Traceback" not in outcome.said
    assert [word for word in BAD[typed] if word not in outcome.said] == [], outcome.said


def test_all_problems_at_once() -> None:
    typed = "optimizer.lrr=1 modle=gpt2_124m steps=None parallel=fsdp3 optimizer.clip=nan"
    outcome = train_py(typed.split())[0]
    assert outcome.code == REFUSED and "5 problems" in outcome.said
    typed = "optimizer.lr=0 batch_sequences=30 micro_batch=31 model.heads=3 model.dropout=2"
    outcome = train_py(typed.split())[0]
    assert outcome.code == REFUSED
    assert all(word in outcome.said for word in ("optimizer.lr", "micro_batch", "model.heads", "model.dropout"))


def test_a_real_process_is_quick_and_imports_no_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "train.py", "optimizer.lrr=1", "parallel=fsdp2"]
    result = processes.finish(processes.start(command))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert result.returncode == REFUSED and "optimizer.lrr" in "\n".join(said)
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert "hydra" in imported and not imported & {"torch", "pyarrow", "datasets", "transformers", "tensorboard"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # seconds of CPU


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("data.files=[/no/such/*.txt]", ["data.files", "/no/such/*.txt"]),
        ("data.field=words", ["data.field", "words"]),
        ("tokenizer=huggingface tokenizer.file=/no/tokenizer.json", ["tokenizer.file", "/no/tokenizer.json"]),
        ("model.vocab_size=100", ["model.vocab_size", "257"]),
        ("hardware.device=cuda", ["hardware.device", "cpu"]),
        ("data.heldout=0 evals.tasks=[heldout]", ["data.heldout"]),
    ],
)
def test_what_only_the_data_and_the_machine_tell(runs: Runs, overrides: str, said: list[str]) -> None:
    """Before the first step, and nothing is left that would stand in the way of the right command."""
    outcome = runs.start("late", overrides)[0]
    if overrides.startswith("hardware.device=cuda") and outcome.code != REFUSED:
        pytest.skip("this machine has a GPU")
    assert (outcome.code, outcome.error) == (REFUSED, ""), outcome
    assert "Traceback" not in outcome.said
    assert [word for word in said if word not in outcome.said] == [], outcome.said
    assert runs.checkpoints("late") == []


def test_a_folder_that_cannot_be_written(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = runs.start("there", f"out={tmp_path / 'file'}")[0]
    assert outcome.code == REFUSED and "out=" in outcome.said and "cannot be written" in outcome.said


def test_two_runs_into_one_folder(runs: Runs) -> None:
    """The second is refused while the first runs. Here the first is this process, which holds the folder."""
    from training.folder import RunFolder

    folder = RunFolder(str(runs.out), "busy")
    assert folder.hold() == []
    try:
        outcome = runs.start("busy")[0]
        assert outcome.code == REFUSED and "another process" in outcome.said
    finally:
        folder.release()
    runs.finish("busy")


def test_two_runs_into_one_folder_of_checkpoints(runs: Runs, tmp_path: Path) -> None:
    """Their names are different; each would delete what the other saves."""
    from training.folder import RunFolder

    first = RunFolder(str(runs.out), "first", str(tmp_path / "shared"))
    assert first.hold_checkpoints() == []
    try:
        outcome = runs.start("second", f"checkpoint.dir={tmp_path / 'shared'}")[0]
        assert outcome.code == REFUSED and "checkpoint.dir=" in outcome.said and "another process" in outcome.said
    finally:
        first.release()


def fit(count: int) -> None:
    """So many sequences of a rank fit into memory."""
    from training import build

    put(build, "fit_micro_batch", lambda *_: count)


def test_a_micro_batch_that_fits_is_checked_too(runs: Runs) -> None:
    """4 sequences a rank: two micro-batches of 2 are found only now, when the folder is the run's."""
    overrides = "parallel=ddp parallel.static_graph=true micro_batch=auto"
    outcomes = runs.start("fitted", overrides, partial(fit, 2), ranks=2)
    assert [outcome.code for outcome in outcomes] == [REFUSED, REFUSED]
    assert "parallel.static_graph" in outcomes[0].said
    status = runs.status("fitted")
    assert (status["state"], status["exit_code"]) == ("failed", REFUSED)
