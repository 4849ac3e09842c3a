"""Compiled runs: each shape is compiled once and announced, any other compilation is a warning and a count.

Dynamo, whose graphs are counted, is real; what it hands its graphs to is `aot_eager`, which runs them as they are: a
kernel takes fifteen seconds to make here."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs.drive import Runs, put, read_lines

pytestmark = pytest.mark.torch211

# 10 steps, an evaluation, 10 steps, an evaluation, a sample. A rank has two micro-batches a step or more. The suite has
# 6 windows and 16 choices: last batches are ragged.
RUN = "steps=20 checkpoint.every=10 metrics.sample_tokens=3 metrics.every=1 evals.batch_sequences=4"
MICRO = "micro_batch=2"
STREAMS = "model.x0=true model.skips=true model.value_embeddings=1"  # blocks with and without a skip and a table


def graphs(path: Path) -> None:
    """After each step and evaluation writes down how many graphs Dynamo has made."""
    import torch
    from torch._dynamo.utils import counters

    from training import loop

    torch.compiler.set_stance(force_backend="aot_eager")
    real = loop.pause

    def write(when: str) -> None:
        with open(path, "a") as file:
            file.write(json.dumps({"when": when, "graphs": counters["stats"]["unique_graphs"]}) + "\n")

    def pause(run: Any, step: int, kind: Any, stopped: Any) -> Any:
        write(f"{step} trained")
        result = real(run, step, kind, stopped)
        write(f"{step} scored")
        return result

    put(loop, "pause", pause)


def cut_smaller(step: int) -> None:
    """In this step micro-batches are cut in two."""
    from training.step import Step

    real, steps = Step.backward, 0

    def backward(self: Step, micro_batches: list[dict[str, Any]], predicted: int) -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            half = len(micro_batches[0]["tokens"]) // 2
            micro_batches = [
                {name: tensor[rows] for name, tensor in inputs.items()}
                for inputs in micro_batches
                for rows in (slice(half), slice(half, None))
            ]
        return real(self, micro_batches, predicted)

    put(Step, "backward", backward)


def lines(said: str, *words: str) -> list[str]:
    return [line for line in said.splitlines() if any(word in line for word in words)]


def recompiles(runs: Runs, name: str) -> list[int]:
    return [record["recompiles"] for record in read_lines(runs.folder(name) / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("ranks", "overrides", "of_training", "of_evaluation"),
    [
        (1, "compile=block", 1, 1),
        pytest.param(1, "compile=model", 1, 1, marks=pytest.mark.slow),
        pytest.param(1, "compile=block compile.dynamic=true", 1, 1, marks=pytest.mark.slow),
        pytest.param(2, "parallel=ddp compile=block", 1, 1, marks=pytest.mark.slow),
        pytest.param(2, "parallel=ddp compile=model", 1, 1, marks=pytest.mark.slow),
        pytest.param(2, "parallel=fsdp2 compile=block", 1, 1, marks=pytest.mark.slow),
        (2, "parallel.pp=2 compile=block", 1, 1),
        # the pieces of a block; what experts get changes from step to step
        pytest.param(2, "parallel=fsdp2 parallel.ep=2 model.moe.experts=4 compile=block", 3, 3, marks=pytest.mark.slow),
        pytest.param(
            2, "parallel.tp=2 model.moe.experts=4 compile=block activations=selective", 3, 3, marks=pytest.mark.slow
        ),
        pytest.param(1, f"compile=block {STREAMS}", 2, 2, marks=pytest.mark.slow),
        pytest.param(
            2,
            "parallel.pp=2 parallel.schedule=interleaved_1f1b model.layers=4 compile=block",
            1,
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(2, "parallel.pp=2 compile=block activations=full", 1, 1, marks=pytest.mark.slow),
        pytest.param(1, "compile=block activations=full", 1, 1, marks=pytest.mark.slow),
        pytest.param(1, "compile=block activations=selective", 1, 1, marks=pytest.mark.slow),
        # whole but for the gathers of FSDP2: the embedding, a block, the rest
        pytest.param(2, "parallel=fsdp2 compile=model", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_each_shape_is_compiled_once(
    ranks: int, overrides: str, of_training: int, of_evaluation: int, runs: Runs, tmp_path: Path
) -> None:
    name = f"{ranks} {overrides}".replace(" ", "-").replace("=", "-")
    seen = tmp_path / "graphs.jsonl"
    said = runs.finish(name, f"{RUN} {MICRO} {overrides}", partial(graphs, seen), ranks=ranks)
    counted = {line["when"]: line["graphs"] for line in read_lines(seen)}
    expected = {f"{step} {what}": of_training for step in range(1, 11) for what in ("trained", "scored")}
    expected["10 scored"] = of_training + of_evaluation
    later = {f"{step} {what}": of_training + of_evaluation for step in range(11, 21) for what in ("trained", "scored")}
    assert counted == expected | later
    told = [line.partition(" in ")[0] for line in lines(said, "compiling for", "compiled in")]
    assert told == [
        "compiling for micro-batches [2, 32] ...",
        "compiled",
        f"compiling for evaluation batches [{3 if 'parallel=' in overrides else 4}, 32] ...",
        "compiled",
    ]
    assert lines(said, "warning") == []
    assert recompiles(runs, name) == [0] * 20


def test_another_shape_is_one_warning_with_its_reason(runs: Runs, tmp_path: Path) -> None:
    meddling = partial(graphs, tmp_path / "graphs.jsonl"), partial(cut_smaller, 5)
    said = runs.finish("smaller", f"{RUN} {MICRO} compile=block", *meddling)
    (warning,) = lines(said, "warning")
    assert "recompiled in" in warning and "[1, 32], not a shape of this run" in warning
    assert "tensor 'x' size mismatch at index 0. expected 2, actual 1" in warning
    assert recompiles(runs, "smaller") == [0] * 4 + [1] * 16


@pytest.mark.slow
def test_one_graph_for_all_shapes(runs: Runs, tmp_path: Path) -> None:
    meddling = partial(graphs, tmp_path / "graphs.jsonl"), partial(cut_smaller, 5)
    said = runs.finish("dynamic", f"{RUN} micro_batch=4 compile=block compile.dynamic=true", *meddling)
    assert lines(said, "warning") == []
    assert recompiles(runs, "dynamic") == [0] * 20


def other_scale(step: int) -> None:
    """In this step the first block has another value of an attribute that its graph relies on; it means the same."""
    from training.step import Step

    real, steps = Step.backward, 0

    def backward(self: Step, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        block: Any = self.spread.model.blocks["0"]
        block.attention.core.scale = block.attention.head_dim**-0.5 if steps == step else None
        return real(self, *args)

    put(Step, "backward", backward)


def test_a_known_shape_that_is_compiled_again_is_a_warning(runs: Runs, tmp_path: Path) -> None:
    meddling = partial(graphs, tmp_path / "graphs.jsonl"), partial(other_scale, 7)
    said = runs.finish("again", f"{RUN} {MICRO} compile=block", *meddling)
    (warning,) = lines(said, "warning")
    assert "for micro-batches [2, 32]: " in warning and "scale" in warning
    assert recompiles(runs, "again") == [0] * 6 + [1] * 14


@pytest.mark.slow
def test_micro_batches_that_are_tried_are_announced(runs: Runs, tmp_path: Path) -> None:
    """The one that is taken was tried, and is not compiled again."""
    words = f"{RUN} batch_sequences=2 micro_batch=auto compile=model"
    said = runs.finish("auto", words, partial(graphs, tmp_path / "graphs.jsonl"))
    assert lines(said, "compiling for") == [
        "compiling for trial micro-batches [1, 32] ...",
        "compiling for trial micro-batches [2, 32] ...",
        "compiling for evaluation batches [4, 32] ...",
    ]
    assert lines(said, "warning") == []


@pytest.mark.slow
def test_names_and_checkpoints_are_those_of_a_plain_run(runs: Runs, tmp_path: Path) -> None:
    """Either goes on from the other's checkpoint."""
    started, longer = f"{MICRO} steps=4 checkpoint.every=4", "steps=6 checkpoint.allow_changes=[steps]"
    for name, first, then in (("names-plain", "none", "block"), ("names-compiled", "block", "model")):
        runs.finish(name, f"{started} compile={first}", partial(graphs, tmp_path / "first"))
        runs.finish(name, f"{started} {longer} compile={then}", partial(graphs, tmp_path / "then"))
    for step in (4, 6):
        plain, compiled = runs.state("names-plain", step), runs.state("names-compiled", step)
        assert compiled.keys() == plain.keys()
        for key, value in plain.items():
            np.testing.assert_allclose(compiled[key], value, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_is_scored_in_one_shape(runs: Runs, tmp_path: Path) -> None:
    runs.finish("scored", f"{MICRO} steps=4 checkpoint.every=4 compile=none")
    words = f"compile=block eval_only=true checkpoint.load={runs.folder('scored')}"
    said = runs.finish("scored-again", words, partial(graphs, tmp_path / "graphs.jsonl"))
    assert lines(said, "compiling for") == ["compiling for evaluation batches [6, 32] ..."]
    before = [line["value"] for line in runs.evals("scored") if line["step"] == 4]
    assert [line["value"] for line in runs.evals("scored-again")] == pytest.approx(before, rel=1e-5)
