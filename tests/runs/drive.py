"""Runs the framework in forked ranks, as train.py does under torchrun or alone, and says what came of it.

A run starts in about a second, since the ranks have torch imported. What a test wants to go wrong in a run, such as a
signal in the midst of a save, it gives as a callable that is called in each rank before the run.
"""

import contextlib
import hashlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import ROOT, RanksFailed, run_ranks

Meddling = Callable[[], Any]
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REFUSED, SAVED, FAILED = 2, 75, 1

# 12 steps of 8 sequences pass over the 1,400 tokens of the text twice: an epoch ends in the midst of the sixth step.
LENGTH, SEQUENCES, STEPS = 32, 8, 12
MODEL = "model.layers=2 model.dim=32 model.heads=2 model.context=32 model.vocab_multiple=1"
TINY = (
    f"{MODEL} tokenizer=bytes data=text steps={STEPS} batch_sequences={SEQUENCES} micro_batch=2 seed=3 compile=none "
    "precision=fp32 schedule.warmup_steps=3 optimizer.lr=0.01 hardware.device=cpu checkpoint.every=3 "
    "checkpoint.keep=10 evals.heldout_tokens=300 evals.continuation_items=4 metrics.every=2 metrics.sample_tokens=0 "
    "metrics.tensorboard=false"
)
DROPOUT = "model.dropout=0.1"


@dataclass(frozen=True)
class Outcome:
    """What a run left on one rank."""

    code: int
    said: str  # stdout and stderr
    error: str  # the exception that it raised, if any


@dataclass(frozen=True)
class Traced:
    """What a rank did in one step, in one of the run's starts."""

    step: int
    rows: list[str]  # hashes of its sequences
    lr: float  # as the optimizer got it
    weights: list[str]  # hash of each rank's weights before the step


def train_py(words: list[str], *meddling: Meddling, ranks: int = 1, timeout: float = 60) -> list[Outcome]:
    """train.py with these words: a plain process, or several ranks of torchrun."""
    return run_ranks(ranks, _start, words, ranks > 1, list(meddling), timeout=timeout)


class Runs:
    """Runs that share a text, its tokens and a folder of outputs."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "outputs"
        self.starts = 0
        text = folder / "text.jsonl"
        write_text(text)
        self.words = [
            *TINY.split(),
            f"data.files=[{text}]",
            "data.heldout=0.4",
            f"data.cache={folder / 'cache'}",
            f"out={self.out}",
        ]

    def start(
        self, name: str, overrides: str = "", *meddling: Meddling, ranks: int = 1, timeout: float = 60
    ) -> list[Outcome]:
        """Starts the run, or goes on with it. The outcome on each rank."""
        self.starts += 1
        trace = partial(trace_steps, self.out / f"{name}.trace", self.starts)
        words = [*self.words, f"name={name}", *overrides.split()]
        return train_py(words, trace, *meddling, ranks=ranks, timeout=timeout)

    def finish(self, name: str, overrides: str = "", *meddling: Meddling, ranks: int = 1) -> str:
        """The same for a run that ends well. What rank 0 said."""
        outcomes = self.start(name, overrides, *meddling, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes
        return outcomes[0].said

    def is_killed(self, name: str, overrides: str = "", *meddling: Meddling, ranks: int = 1) -> bool:
        """The same for a run that may be killed."""
        try:
            self.start(name, overrides, *meddling, ranks=ranks)
        except RanksFailed as error:
            if "died of SIGKILL" in str(error):
                return True
            raise
        return False

    def die(self, name: str, overrides: str = "", *meddling: Meddling, ranks: int = 1) -> None:
        """The same for a run that is killed: fails if it is not."""
        assert self.is_killed(name, overrides, *meddling, ranks=ranks), f"{name} was not killed"

    def folder(self, name: str) -> Path:
        return self.out / name

    def records(self, name: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what a clock or the machine decides."""
        kept = ("step", "loss", "grad_norm", "lr", "tokens", "skipped_steps")
        return [{key: line[key] for key in kept} for line in read_lines(self.folder(name) / "metrics.jsonl")]

    def evals(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.folder(name) / "evals.jsonl")

    def status(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder(name) / "status.json").read_text())

    def checkpoints(self, name: str) -> list[int]:
        """Steps that have a complete one."""
        markers = (self.folder(name) / "checkpoints").glob("step-*/COMPLETE")
        return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder(name) / "checkpoints" / f"step-{step:06d}"

    def state(self, name: str, step: int) -> dict[str, np.ndarray]:
        """Weights and optimizer in the checkpoint of the step, whole."""
        return run_ranks(1, _read_state, self.checkpoint(name, step))[0]

    def traced(self, name: str) -> list[Traced]:
        """All steps of all starts, in the order of their numbers; the rows of all ranks in the order of the batch."""
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for path in sorted((self.out / f"{name}.trace").glob("*.jsonl")):
            for line in read_lines(path):
                found.setdefault((line["step"], line["start"]), []).append(line)
        return [
            Traced(
                step,
                [row for line in lines for row in line["rows"]],
                lines[0]["lr"],
                [line["weights"] for line in lines],
            )
            for (step, _), lines in sorted(found.items())
        ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_text(path: Path) -> None:
    """Some 1,400 bytes to train on and some 1,000 to hold out: sums, each document of others."""

    def document(a: int) -> str:
        return "".join(f"{a} + {b} = {a + b}; {a} x {b} = {a * b}.\n" for b in range(2, 9))

    path.write_text("".join(json.dumps({"text": document(a)}) + "\n" for a in range(17)))


# ---- what runs in a rank


def _start(words: list[str], launched: bool, meddling: list[Meddling]) -> Outcome:
    """train.py, as if these were its words on the command line."""
    if not launched:
        for name in LAUNCHED:
            del os.environ[name]
    sys.argv = [str(ROOT / "train.py"), *words]
    sys.orig_argv[:] = ["python", "train.py", *words]  # what status.json's command is made from
    from training import compose

    compose.FIRST_RANK_PATIENCE = 0.1
    for meddle in meddling:
        meddle()
    heard, code, raised = io.StringIO(), 0, ""
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            code, raised = FAILED, f"{type(error).__name__}: {error}"
    print(heard.getvalue(), raised)
    return Outcome(code, heard.getvalue(), raised)


def _read_state(folder: Path) -> dict[str, np.ndarray]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def trace_steps(folder: Path, start: int) -> None:
    """Writes down what is trained on with which rate, as the step gets it and not as it is logged."""
    from parallel.local import local
    from training import loop
    from training.step import Step

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.environ.get('RANK', '0')}.jsonl"
    real_seed, real_step, now = loop.seed_step, Step.__call__, 0

    def seed_step(seed: int, step: int, data_rank: int) -> None:
        nonlocal now
        now = step + 1
        real_seed(seed, step, data_rank)

    def call(self: Step, micro_batches: list[dict[str, Any]], predicted: int, lr: float, *more: Any) -> Any:
        rows = [
            hashlib.sha256(tokens.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()[:16]
            for part in micro_batches
            for tokens, labels in zip(part["tokens"], part["labels"], strict=True)
        ]
        weights = hashlib.sha256(b"".join(local(p).detach().numpy().tobytes() for p in self.parameters)).hexdigest()[
            :16
        ]
        with open(path, "a") as file:
            file.write(json.dumps({"start": start, "step": now, "rows": rows, "lr": lr, "weights": weights}) + "\n")
        return real_step(self, micro_batches, predicted, lr, *more)

    put(loop, "seed_step", seed_step)
    put(Step, "__call__", call)


def put(owner: object, name: str, new: Any) -> None:
    """Puts a function of this test in the place of one of a module or class, in this rank."""
    setattr(owner, name, new)


def hit(number: int, rank: int | None = None) -> None:
    """Sends this process the signal; with `rank` only if it is that one."""
    if rank is None or rank == int(os.environ.get("RANK", "0")):
        os.kill(os.getpid(), number)


def hit_in_step(step: int, number: int, rank: int | None = None) -> None:
    """The signal comes when the step has begun."""
    from training import loop

    real = loop.seed_step

    def seed_step(seed: int, done: int, data_rank: int) -> None:
        if done + 1 == step:
            hit(number, rank)
        real(seed, done, data_rank)

    put(loop, "seed_step", seed_step)


def hit_before(name: str, number: int, time: int = 1) -> None:
    """The signal comes before the file of that name is put in its place for the time-th time."""
    reals = {"replace": os.replace, "rename": os.rename}
    seen = 0

    def renamed(how: str, source: Any, target: Any) -> None:
        nonlocal seen
        seen += Path(target).name == name
        if Path(target).name == name and seen == time:
            hit(number)
        reals[how](source, target)

    for how in reals:
        put(os, how, partial(renamed, how))


def hit_in_evaluation(batch: int, number: int, rank: int | None = None) -> None:
    """The signal comes before a batch (from 1) of what is scored in this start."""
    from training.evaluation import Evaluation

    real, seen = Evaluation.losses, 0

    def losses(self: Evaluation, tokens: Any, labels: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == batch:
            hit(number, rank)
        return real(self, tokens, labels)

    put(Evaluation, "losses", losses)


def hit_in_call(module: str, name: str, number: int, time: int = 1) -> None:
    """The signal comes when a function, as the module knows it, is called for the time-th time."""
    import importlib

    owner = importlib.import_module(module)
    real, seen = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == time:
            hit(number)
        return real(*args, **kwargs)

    put(owner, name, call)


# ---- for the conftest.py of each folder that has runs


@pytest.fixture(scope="module")  # two files may give runs the same name
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))
