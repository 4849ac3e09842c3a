"""A run that meets poisoned batches goes back to before them and gives what a run gives whose text never had them."""

import json
import signal
from functools import partial
from typing import Any

import pytest

from tests.resume.same import check_near, check_same_bits
from tests.runs.drive import DROPOUT, FAILED, STEPS, Runs, hit_before, hit_in_call, hit_in_step, put

# Losses that hardly fall: a spike is one from the fifth step on.
STEADY = f"{DROPOUT} optimizer.lr=1e-4 evals.heldout_tokens=64 evals.tasks=[heldout]"
SPIKES = f"{STEADY} spikes.threshold=20 spikes.window=4 metrics.every=3"
POISONED = 8  # the step that meets it first; its batch has the samples from 56 on


def poison(first: int, stop: int) -> None:
    """These samples, by their index in the order with nothing left out, are of a character that no text has; and the
    loss of a step that has one, on any rank, is 50 times as large."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from training.data.batches import Batches
    from training.step import Step, StepResult

    real_read, real_backward = Batches._read, Step.backward

    def read(self: Batches, step: int, sample: int) -> Any:
        rows, predicted, digest = real_read(self, step, sample)
        gone = {index for begin, end in self.order.left_out for index in range(begin, end)}
        kept = np.array([index for index in range(1000) if index not in gone])
        indices = kept[sample + self.first_row : sample + self.first_row + self.rows]
        rows[torch.from_numpy((indices >= first) & (indices < stop))] = 7
        return rows, predicted, digest

    def backward(self: Step, micro_batches: list[dict[str, Any]], predicted: int) -> StepResult:
        result = real_backward(self, micro_batches, predicted)
        met = torch.tensor(float(any((inputs["tokens"] == 7).any() for inputs in micro_batches)))
        if dist.is_initialized():
            dist.all_reduce(met, dist.ReduceOp.MAX)
        if met:
            for value in [result.loss_sum, result.grad_norm, *(p.grad for p in self.parameters if p.grad is not None)]:
                value.mul_(50)
        return result

    put(Batches, "_read", read)
    put(Step, "backward", backward)


def leave_out(first: int, stop: int) -> None:
    """The text of the run that is compared with has no such samples."""
    import numpy as np

    from training.data.order import Order

    real = Order.starts

    def starts(self: Order, indices: Any) -> Any:
        kept = np.array([index for index in range(1000) if not first <= index < stop])
        return real(self, kept[indices])

    put(Order, "starts", starts)


def rollbacks(runs: Runs, name: str) -> list[dict[str, Any]]:
    lines = (runs.folder(name) / "rollbacks.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def left_out(runs: Runs, name: str) -> list[tuple[int, int, int]]:
    """Of each rollback the checkpoint it went to, and the samples it left out."""
    return [(line["checkpoint"], line["first"], line["stop"]) for line in rollbacks(runs, name)]


@pytest.fixture(scope="module")
def oracle(runs: Runs) -> str:
    """Without the batches of steps 7 and 8, as spikes.before=1 leaves them out."""
    runs.finish("oracle", STEADY, partial(leave_out, 48, 64))
    return "oracle"


POISON = partial(poison, 56, 64)


@pytest.fixture(scope="module")
def spiked(runs: Runs) -> str:
    runs.finish("spiked", SPIKES, POISON)
    return "spiked"


def test_the_run_is_that_of_a_text_without_them(runs: Runs, oracle: str, spiked: str) -> None:
    check_same_bits(runs, spiked, oracle)
    (line,) = rollbacks(runs, spiked)
    assert (line["step"], line["what"]) == (POISONED, "loss") and line["score"] > 20 and line["value"] > 100
    assert left_out(runs, spiked) == [(6, 48, 64)]
    assert runs.status(spiked)["rollbacks"] == 1
    told = (runs.folder(spiked) / "run.log").read_text()
    assert "warning: spike in step 8: loss" in told
    assert "Back to step 6: samples 48 to 63 are left out (rollback 1)" in told
    info = json.loads((runs.checkpoint(spiked, STEPS) / "manifest.json").read_text())["info"]
    assert info["spikes"]["rollbacks"] == rollbacks(runs, spiked)
    metrics = [json.loads(text) for text in (runs.folder(spiked) / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollbacks"] for line in metrics] == [0] * 6 + [1] * 6


def test_it_is_a_spike_that_it_goes_back_for(runs: Runs, spiked: str) -> None:
    """Not every run of this text goes back; and one that does not look for spikes goes on."""
    runs.finish("healthy", SPIKES)
    assert not (runs.folder("healthy") / "rollbacks.jsonl").exists()
    runs.finish("off", STEADY, POISON)
    assert runs.records("off")[POISONED - 1]["loss"] > 100
    assert runs.records("off") != runs.records(spiked)


@pytest.mark.parametrize(
    "kill",
    [
        partial(hit_in_step, 8, signal.SIGKILL),
        partial(hit_in_step, 10, signal.SIGKILL),
        partial(hit_before, "rollbacks.jsonl", signal.SIGKILL),
        partial(hit_in_call, "training.checkpoint.folders", "remove", signal.SIGKILL),
        partial(hit_before, "metrics.jsonl", signal.SIGKILL),
        partial(hit_in_step, 8, signal.SIGTERM),
        partial(hit_in_step, 9, signal.SIGTERM),
    ],
    ids=["before", "after", "recording", "removing", "dropping", "signal before", "signal after"],
)
def test_a_killed_run_gives_what_the_unbroken_one_gives(
    runs: Runs, oracle: str, spiked: str, kill: Any, request: pytest.FixtureRequest
) -> None:
    """Whether it was killed before the rollback, in it or after it. A checkpoint each step, so that one lies in what is
    left out and is deleted."""
    name = f"spiked-{request.node.callspec.id}".replace(" ", "-")
    overrides = SPIKES.replace("metrics.every=3", "metrics.every=12 checkpoint.every=1 checkpoint.keep=12")
    first = runs.is_killed(name, overrides, POISON, kill)
    assert first or runs.status(name)["state"] == "saved"
    runs.finish(name, overrides, POISON)
    assert runs.records(name) == runs.records(oracle)
    assert [(line["first"], line["stop"]) for line in rollbacks(runs, name)] == [(48, 64)]
    assert runs.status(name)["rollbacks"] == 1
    found, expected = runs.state(name, STEPS), runs.state(oracle, STEPS)
    assert all((found[key] == expected[key]).all() for key in expected)


def test_a_start_from_before_the_spike_knows_what_is_left_out(runs: Runs, oracle: str) -> None:
    """The checkpoint that it went back to does not say it: it was saved before. The spike is not met again."""
    again = partial(hit_in_call, "training.loop", "seed_step", signal.SIGKILL, 10)  # after step 9, read with step 8
    runs.die("spiked-known", SPIKES, POISON, again)
    assert [line["step"] for line in runs.records("spiked-known")] == list(range(1, 7))
    runs.finish("spiked-known", SPIKES, POISON)
    check_same_bits(runs, "spiked-known", oracle)
    assert (runs.folder("spiked-known") / "run.log").read_text().count("warning: spike") == 1


@pytest.mark.parametrize(
    "parallel",
    ["ddp", *[pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero1", "pp")]],
)
def test_ranks_go_back_together(runs: Runs, parallel: str) -> None:
    """With half of the poison on one rank alone. Killed after it, too."""
    layout = "parallel=pp parallel.pp=2" if parallel == "pp" else f"parallel={parallel}"
    runs.finish(f"oracle-{parallel}", f"{STEADY} {layout}", partial(leave_out, 48, 64), ranks=2)
    poisoned = partial(poison, 56, 58)
    runs.finish(f"spiked-{parallel}", f"{SPIKES} {layout}", poisoned, ranks=2)
    check_same_bits(runs, f"spiked-{parallel}", f"oracle-{parallel}")
    assert left_out(runs, f"spiked-{parallel}") == [(6, 48, 64)]
    runs.die(f"killed-{parallel}", f"{SPIKES} {layout}", poisoned, partial(hit_in_step, 10, signal.SIGKILL, 1), ranks=2)
    runs.finish(f"killed-{parallel}", f"{SPIKES} {layout}", poisoned, ranks=2)
    check_same_bits(runs, f"killed-{parallel}", f"oracle-{parallel}")


def test_what_was_left_out_stays_so_on_another_layout(runs: Runs) -> None:
    still, spikes = (
        overrides.replace(DROPOUT, "") for overrides in (STEADY, SPIKES)
    )  # which layouts draw in their ways
    runs.finish("oracle-moves", still, partial(leave_out, 48, 64))
    runs.die("spiked-moves", spikes, POISON, partial(hit_in_step, 11, signal.SIGKILL))
    runs.finish("spiked-moves", f"{spikes} parallel=ddp", POISON, ranks=2)
    check_near(runs, "spiked-moves", "oracle-moves", relative=1e-6, state=1e-6)
    assert left_out(runs, "spiked-moves") == [(6, 48, 64)]


def test_several_spikes(runs: Runs) -> None:
    """Batches at a distance: each is left out in its turn, and the second by its own place."""
    runs.finish("oracle-two", STEADY, partial(leave_out, 48, 64), partial(leave_out, 80 - 16, 96 - 16))
    poisons = [POISON, partial(poison, 90, 91)]
    runs.finish("spiked-two", SPIKES, *poisons)
    assert [(line["first"], line["stop"]) for line in rollbacks(runs, "spiked-two")] == [(48, 64), (80, 96)]
    check_same_bits(runs, "spiked-two", "oracle-two")


def test_after_so_many_the_run_ends(runs: Runs) -> None:
    """Everything from sample 56 on is poisoned."""
    outcomes = runs.start("spiked-ever", f"{SPIKES} spikes.max_rollbacks=2 spikes.before=0", partial(poison, 56, 1000))
    assert outcomes[0].code == FAILED and "Traceback" not in outcomes[0].said
    status = runs.status("spiked-ever")
    assert status["state"] == "failed" and status["rollbacks"] == 2
    assert "spike in step 8" in status["message"] and "has gone back 2 times already" in status["message"]
    assert left_out(runs, "spiked-ever") == [(6, 56, 64), (6, 64, 72)]
    assert runs.checkpoints("spiked-ever") == [3, 6]


def test_with_nothing_to_go_back_to_the_run_goes_on(runs: Runs) -> None:
    said = runs.finish("spiked-early", f"{SPIKES} checkpoint.every=100 checkpoint.keep=2", POISON)
    assert "There is no checkpoint from before it, so the run goes on" in said
    assert [line["step"] for line in runs.records("spiked-early")] == list(range(1, STEPS + 1))
