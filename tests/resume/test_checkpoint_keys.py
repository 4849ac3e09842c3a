"""What a user may ask of checkpoints: go on, begin from one, make a run longer, and what is refused."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.resume.same import check_same_bits, check_same_state, check_steps
from tests.runs.drive import (
    DROPOUT,
    FAILED,
    REFUSED,
    SAVED,
    STEPS,
    Meddling,
    Runs,
    hit_in_call,
    hit_in_evaluation,
    hit_in_step,
    put,
    train_py,
)

LARGEST = "the largest file of tensors"


def damaged(checkpoint: Path, name: str) -> Path:
    if name == LARGEST:
        return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    return checkpoint / name


@pytest.mark.parametrize(
    ("name", "left"),
    [(LARGEST, 0.5), (LARGEST, 0.0), (".metadata", None), ("manifest.json", 0.5), ("COMPLETE", None)],
)
def test_a_damaged_newest_checkpoint(runs: Runs, copy: str, whole: str, name: str, left: float | None) -> None:
    """The one before it is used, loudly. left: share of the file that is left; None: not even a name."""
    path = damaged(runs.checkpoint(copy, STEPS), name)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    said = runs.finish(copy, DROPOUT)
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    if name != "COMPLETE":  # without it the save did not end, which is nothing to warn of
        assert any(f"step-{STEPS:06d}" in line for line in warnings), said
    assert "going on from" in said
    assert {traced.step for traced in runs.traced(copy)} == {10, 11, 12}
    check_same_bits(runs, copy, whole)


def test_tensors_that_cannot_be_read(runs: Runs, copy: str) -> None:
    """Found when the folder is the run's already: its status says so."""
    shutil.rmtree(runs.checkpoint(copy, STEPS))
    for step in (3, 6, 9):
        path = damaged(runs.checkpoint(copy, step), LARGEST)
        path.write_bytes(bytes(path.stat().st_size))
    outcome = runs.start(copy, DROPOUT)[0]
    assert outcome.code == REFUSED and "each of its checkpoints is damaged" in outcome.said
    status = runs.status(copy)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", REFUSED, 9)
    assert status["message"] in outcome.said


def test_the_second_start_of_a_finished_run(runs: Runs, copy: str, whole: str) -> None:
    said = runs.finish(copy, DROPOUT)
    assert runs.traced(copy) == []
    table = runs.evals(whole)[-1]
    assert f"{table['value']:.4f}" in said
    assert f"steps={2 * STEPS} 'checkpoint.allow_changes=[steps]'" in said
    assert "eval_only=true" in said
    check_same_bits(runs, copy, whole)


def test_longer(runs: Runs) -> None:
    """A finished run is made longer by the command it names, and gives what the longer run would have given."""
    constant = f"{DROPOUT} schedule=constant"
    runs.finish("long", constant)
    runs.finish("short", f"{constant} steps=6")
    refused = runs.start("short", constant)[0]
    assert refused.code == REFUSED
    assert "steps=12" in refused.said and "checkpoint.allow_changes=[steps]" in refused.said
    said = runs.finish("short", f"{constant} checkpoint.allow_changes=[steps]")
    assert "steps: 6 -> 12" in said
    check_steps(runs, "short", "long")
    check_same_bits(runs, "short", "long")
    assert runs.checkpoints("short") == [3, 6, 9, 12]


def test_no_step_is_left(runs: Runs, copy: str, whole: str) -> None:
    """A run is not finished by what it has not done, nor by more than it should have."""
    load = f"checkpoint.load={runs.folder(whole)} checkpoint.load_parts=all"
    refused = runs.start("nothing-left", f"{DROPOUT} {load}")[0]
    assert refused.code == REFUSED and f"has {STEPS} steps already" in refused.said and "steps=24" in refused.said
    assert not runs.folder("nothing-left").exists()
    for allowed in ("", " checkpoint.allow_changes=[steps]"):
        refused = runs.start(copy, f"{DROPOUT} steps=9{allowed}")[0]
        assert refused.code == REFUSED and f"steps={STEPS}" in refused.said and "1 problem." in refused.said
    assert runs.status(copy) == runs.status(whole)


def test_another_batch_repeats_and_skips_no_sample(runs: Runs, whole: str) -> None:
    runs.die("rebatched", DROPOUT, partial(hit_in_step, 8, signal.SIGKILL))
    half = "batch_sequences=4 checkpoint.allow_changes=[batch_sequences]"
    runs.finish("rebatched", f"{DROPOUT} {half}")
    wanted = [row for step in runs.traced(whole) if 7 <= step.step <= 9 for row in step.rows]
    assert [row for step in runs.traced("rebatched")[-6:] for row in step.rows] == wanted
    tokens = [*range(256, 6 * 256 + 1, 256), *range(6 * 256 + 128, 9 * 256 + 1, 128)]
    assert [line["tokens"] for line in runs.records("rebatched")] == tokens
    runs.start("rebatched", f"{DROPOUT} {half} steps=13 checkpoint.allow_changes=[batch_sequences,steps]")
    assert runs.records("rebatched")[-1]["tokens"] == 9 * 256 + 128


def test_changed_mathematics_is_refused(runs: Runs, copy: str, whole: str) -> None:
    outcome = runs.start(copy, f"{DROPOUT} optimizer.lr=0.02 seed=4 micro_batch=4")[0]
    assert outcome.code == REFUSED and "2 problems" in outcome.said  # micro_batch changes no mathematics
    assert "optimizer.lr=0.02" in outcome.said and "seed=4" in outcome.said
    check_same_bits(runs, copy, whole)  # nothing was touched


def set_environment(**values: str) -> None:
    os.environ.update(values)


def test_a_changed_value_of_the_environment_is_refused(runs: Runs) -> None:
    begin = f"{DROPOUT} evals=none optimizer.lr=${{oc.env:ESPALIER_LR}}"
    former, other = (partial(set_environment, ESPALIER_LR=value) for value in ("0.0123", "0.1"))
    for step in (3, 5):  # before its first checkpoint, and after
        runs.die("variable", begin, former, partial(hit_in_step, step, signal.SIGKILL))
        refused = runs.start("variable", begin, other)[0]
        assert refused.code == REFUSED and "${oc.env:ESPALIER_LR}" in refused.said
    assert "optimizer.lr=0.1" in refused.said
    runs.finish("variable", begin, former)
    assert "0.0123" not in (runs.checkpoint("variable", STEPS) / "manifest.json").read_text()


def test_a_changed_layout_is_shown(runs: Runs, copy: str) -> None:
    (runs.checkpoint(copy, STEPS) / "COMPLETE").unlink()
    said = runs.finish(copy, f"{DROPOUT} micro_batch=4")
    assert "micro_batch: 2 -> 4" in said


def test_a_folder_that_holds_another_run(runs: Runs, copy: str, whole: str) -> None:
    refused = runs.start(copy, f"{DROPOUT} checkpoint.resume=never")[0]
    assert refused.code == REFUSED and f"name={copy}" in refused.said
    runs.die("early", DROPOUT, partial(hit_in_step, 3, signal.SIGKILL))
    refused = runs.start("early", f"{DROPOUT} seed=4")[0]
    assert refused.code == REFUSED and "holds another run" in refused.said and "delete" in refused.said
    assert runs.records("early") == runs.records(whole)[:2]


def test_checkpoints_that_are_not_found(runs: Runs, copy: str, whole: str, tmp_path: Path) -> None:
    """Moved or lost, a run is not begun again, which would replace its metrics."""
    moved = (runs.folder(copy) / "checkpoints").rename(tmp_path / "moved")
    for elsewhere in ("", f" checkpoint.dir={tmp_path / 'wrong'}"):
        refused = runs.start(copy, DROPOUT + elsewhere)[0]
        assert refused.code == REFUSED and f"saved step {STEPS}" in refused.said and "checkpoint.dir=" in refused.said
        assert runs.records(copy) == runs.records(whole)
    runs.finish(copy, f"{DROPOUT} checkpoint.dir={moved}")
    assert runs.traced(copy) == [] and runs.records(copy) == runs.records(whole)


def test_resume_must(runs: Runs) -> None:
    refused = runs.start("none-there", "checkpoint.resume=must")[0]
    assert refused.code == REFUSED and "no complete checkpoint" in refused.said
    assert not runs.folder("none-there").exists()


def keep_first_state(path: Path) -> None:
    """Writes down weights and optimizer as the first step of this start finds them."""
    from training.step import Step

    real = Step.__call__

    def call(self: Step, *args: Any) -> Any:
        if not path.exists():
            weights: dict[str, Any] = {
                f"model.{name}": value.detach().numpy() for name, value in self.spread.model.named_parameters()
            }
            moments: dict[str, Any] = {
                f"optimizer.{name}": value.numpy() for name, value in self.optimizer.tensors().items()
            }
            np.savez(path, **weights, **moments)
        return real(self, *args)

    put(Step, "__call__", call)


def test_weights_alone(runs: Runs, whole: str, tmp_path: Path) -> None:
    """Another run begins from the weights of a run's newest checkpoint: step 1, a fresh optimizer, its own data and
    learning rate. Broken, it goes on from its own checkpoints."""
    begin = f"{DROPOUT} checkpoint.load={runs.folder(whole)} optimizer.lr=0.001 seed=8"
    said = runs.finish("tuned", begin, partial(keep_first_state, tmp_path / "first.npz"))
    assert f"starting from {runs.checkpoint(whole, STEPS)}" in said
    first, end = np.load(tmp_path / "first.npz"), runs.state(whole, STEPS)
    assert set(first) == set(end)
    for name in end:
        assert np.array_equal(first[name], end[name] if name.startswith("model.") else 0 * end[name]), name
    assert [line["step"] for line in runs.records("tuned")] == list(range(1, STEPS + 1))
    assert runs.records("tuned")[2]["lr"] == 0.001

    runs.die("tuned-broken", begin, partial(hit_in_step, 5, signal.SIGKILL))
    runs.finish("tuned-broken", begin)
    check_same_bits(runs, "tuned-broken", "tuned")


def test_all_of_another_run(runs: Runs, whole: str) -> None:
    """With load_parts=all a new folder goes on where an older checkpoint is."""
    load = f"checkpoint.load={runs.checkpoint(whole, 6)} checkpoint.load_parts=all"
    runs.finish("branch", f"{DROPOUT} {load}")
    assert runs.records("branch") == runs.records(whole)[6:]
    check_same_state(runs, "branch", whole)


def test_nothing_to_load(runs: Runs, whole: str) -> None:
    refused = runs.start("nothing", "checkpoint.load=/no/such/folder")[0]
    assert refused.code == REFUSED and "/no/such/folder" in refused.said
    refused = runs.start("nothing", f"checkpoint.load={runs.folder(whole)} model.dim=64 model.layers=3")[0]
    assert refused.code == REFUSED and "model.dim=32" in refused.said and "model.layers=2" in refused.said


def test_a_tested_restore(runs: Runs, whole: str) -> None:
    runs.finish("tested", f"{DROPOUT} checkpoint.test_restore=always")
    check_same_bits(runs, "tested", whole)
    assert runs.checkpoints("tested") == [3, 6, 9, 12]  # what was saved for the test is gone


def read_wrong() -> None:
    """A destination that gives back other bits than it was given: the last bit of one number."""
    import torch

    from training.checkpoint import tensors

    real = tensors.read

    def read(folder: Path, state: dict[str, Any], ranks: Any) -> None:
        real(folder, state, ranks)
        norm = next(value for name, value in state.items() if name.startswith("model.") and "norm" in name)
        norm.view(torch.int32)[0] ^= 1

    put(tensors, "read", read)


def test_a_restore_that_differs_stops_the_run(runs: Runs) -> None:
    outcome = runs.start("untested", f"{DROPOUT} checkpoint.test_restore=always", read_wrong)[0]
    assert outcome.code == FAILED and "read back, these differ" in outcome.said and "norm" in outcome.said
    assert "Traceback" not in outcome.said
    assert runs.status("untested")["state"] == "failed"
    assert len(runs.traced("untested")) == 1


def test_saving_fails_once(runs: Runs, whole: str) -> None:
    """A full disk: the run ends with a message, the older checkpoint is whole, and the run goes on from it."""
    outcome = runs.start("full", DROPOUT, partial(full_disk, 2))[0]
    assert outcome.code == FAILED and "No space left on device" in outcome.said and "step 6" in outcome.said
    assert "Traceback" not in outcome.said
    assert runs.checkpoints("full") == [3] and not runs.checkpoint("full", 6).exists()
    assert runs.status("full")["state"] == "failed"
    runs.finish("full", DROPOUT)
    check_same_bits(runs, "full", whole)


def full_disk(time: int) -> None:
    import errno

    from training.checkpoint import folders

    real, seen = folders.complete, 0

    def complete(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == time:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    put(folders, "complete", complete)


# ---- scores


@pytest.mark.parametrize("evals", ["evals=none", "evals.every=1", "evals.tasks=[continuation] evals.batch_sequences=1"])
def test_scoring_changes_nothing_in_training(runs: Runs, whole: str, evals: str) -> None:
    name = f"scored-{evals}".replace(" ", "-").replace("=", "-").replace("[", "").replace("]", "")
    runs.finish(name, f"{DROPOUT} {evals}")
    assert runs.records(name) == runs.records(whole)
    check_same_state(runs, name, whole)
    steps = {"evals=none": set(), "evals.every=1": set(range(1, STEPS + 1))}.get(evals, {3, 6, 9, 12})
    assert {line["step"] for line in runs.evals(name)} == steps


def note_calls(path: Path) -> list[Meddling]:
    """Writes down the order of steps and scores."""
    return [
        partial(note_call, path, "training.loop", "seed_step"),
        partial(note_call, path, "training.checkpoint.folders", "write_scores"),
    ]


def note_call(path: Path, module: str, name: str) -> None:
    import importlib

    owner = importlib.import_module(module)
    real = getattr(owner, name)

    def call(*args: Any) -> Any:
        with open(path, "a") as file:
            file.write(name + "\n")
        return real(*args)

    put(owner, name, call)


def test_an_unscored_checkpoint_is_scored_first(runs: Runs, copy: str, whole: str, tmp_path: Path) -> None:
    shutil.rmtree(runs.checkpoint(copy, 12))
    (runs.checkpoint(copy, 9) / "scores.json").unlink()
    runs.finish(copy, DROPOUT, *note_calls(tmp_path / "calls"))
    assert (tmp_path / "calls").read_text().split() == ["write_scores", *["seed_step"] * 3, "write_scores"]
    check_same_bits(runs, copy, whole)
    scores = [(runs.checkpoint(name, 9) / "scores.json").read_text() for name in (copy, whole)]
    assert scores[0] == scores[1]


def test_an_unscored_last_checkpoint_is_scored_at_the_next_start(runs: Runs, copy: str, whole: str) -> None:
    (runs.checkpoint(copy, STEPS) / "scores.json").unlink()
    runs.finish(copy, DROPOUT)
    assert (runs.checkpoint(copy, STEPS) / "scores.json").exists()
    assert runs.traced(copy) == []
    check_same_bits(runs, copy, whole)


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "single"), (2, "fsdp2")])
def test_eval_only_gives_the_numbers_of_the_run(runs: Runs, whole: str, ranks: int, parallel: str) -> None:
    """Nothing of the model, the tokenizer and the text is said: they are the checkpoint's."""
    kept = ("out=", "data.cache=", "evals.", "hardware.")
    words = [word for word in runs.words if word.startswith(kept)]
    load = f"checkpoint.load={runs.checkpoint(whole, 6)}"
    name = f"again-{parallel}"
    outcomes = train_py([*words, f"name={name}", "eval_only=true", load, f"parallel={parallel}"], ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes
    found, expected = runs.evals(name), [line for line in runs.evals(whole) if line["step"] == 6]
    if ranks == 1:
        assert found == expected
    assert [line | {"value": 0, "stderr": 0} for line in found] == [
        line | {"value": 0, "stderr": 0} for line in expected
    ]
    np.testing.assert_allclose([x["value"] for x in found], [x["value"] for x in expected], rtol=1e-5)
    assert not (runs.folder(name) / "checkpoints").exists() and not (runs.folder(name) / "metrics.jsonl").exists()


def test_a_checkpoint_whose_model_came_from_the_environment(runs: Runs) -> None:
    wide = partial(set_environment, ESPALIER_DIM="32")
    runs.finish("from-variable", "steps=3 model.dim=${oc.env:ESPALIER_DIM}", wide)
    load = f"checkpoint.load={runs.folder('from-variable')}"
    kept = [word for word in runs.words if word.startswith(("out=", "data.cache=", "hardware."))]
    refused = train_py([*kept, "eval_only=true", load])[0]
    assert refused.code == REFUSED and "ESPALIER_DIM" in refused.said and "model.dim" in refused.said
    scored = train_py([*kept, "eval_only=true", load], wide)[0]
    assert scored.code == 0, scored
    assert runs.evals("from-variable-scored") == runs.evals("from-variable")
    runs.finish("from-those-weights", f"steps=3 {load} model.dim=32")


def test_a_stopped_eval_only_says_nothing_of_a_run(runs: Runs, whole: str) -> None:
    words = [*runs.words, "name=stopped-scores", "eval_only=true", f"checkpoint.load={runs.checkpoint(whole, 6)}"]
    outcome = train_py(words, partial(hit_in_evaluation, 1, signal.SIGTERM))[0]
    assert outcome.code == SAVED
    assert not (runs.folder("stopped-scores") / "status.json").exists()


def test_tensorboard_has_each_step_once(runs: Runs, whole: str) -> None:
    """As TensorBoard itself reads it, after a kill that left events of steps that were done again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = f"{DROPOUT} metrics.tensorboard=true metrics.every=1"
    runs.die("shown", shown, partial(hit_in_step, 9, signal.SIGKILL))
    outcome = runs.start("shown", shown, partial(hit_in_call, "training.loop", "score", signal.SIGTERM))[0]
    assert outcome.code == SAVED
    runs.finish("shown", shown)
    events = EventAccumulator(str(runs.folder("shown")))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([loss for _, loss in losses], [line["loss"] for line in runs.records(whole)], rtol=1e-6)
    scores = [(event.step, event.value) for event in events.Scalars("evals/heldout/bits_per_byte")]
    expected = [line for line in runs.evals(whole) if line["metric"] == "bits_per_byte"]
    assert [step for step, _ in scores] == [line["step"] for line in expected]
    np.testing.assert_allclose([value for _, value in scores], [line["value"] for line in expected], rtol=1e-6)


def test_ephemeral_and_permanent_steps(runs: Runs) -> None:
    """Ephemeral ones are not scored and go when a newer one is there; the policy is the same after a restart."""
    keys = (
        f"{DROPOUT} checkpoint.every=5 checkpoint.ephemeral_every=2 checkpoint.permanent_steps=[3] checkpoint.keep=1 "
        "checkpoint.keep_best=continuation.accuracy checkpoint.best_is=highest evals.tasks=[continuation]"
    )
    runs.die("kinds", keys, partial(hit_in_step, 5, signal.SIGKILL))
    assert runs.checkpoints("kinds") == [3, 4]
    assert [(runs.checkpoint("kinds", step) / "scores.json").exists() for step in (3, 4)] == [True, False]
    runs.finish("kinds", keys)
    left = runs.checkpoints("kinds")
    assert {3, 10, 12} <= set(left) <= {3, 5, 10, 12}
    scores = {line["step"]: line["value"] for line in runs.evals("kinds")}
    assert set(scores) == {3, 5, 10, 12}
    if 5 in left:  # it had the best when the last one was saved, whose score came after
        assert scores[5] > max(scores[3], scores[10])


def test_an_ephemeral_checkpoint_by_the_clock(runs: Runs) -> None:
    runs.finish("clock", f"{DROPOUT} checkpoint.every=0 checkpoint.every_minutes=0.000001 evals=none", ranks=1)
    assert runs.checkpoints("clock") == [12]
    runs.die(
        "clock-two",
        f"{DROPOUT} checkpoint.every=0 checkpoint.every_minutes=0.000001 parallel=fsdp2",
        partial(hit_in_step, 7, signal.SIGKILL),
        ranks=2,
    )
    [step] = runs.checkpoints("clock-two")
    assert step in (4, 5, 6)
    assert not (runs.checkpoint("clock-two", step) / "scores.json").exists()
