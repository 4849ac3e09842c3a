"""The steps of a run."""

import gc
import logging
import time
from dataclasses import dataclass
from typing import Any

from parallel.mesh import shorten_timeouts
from training.agreement import Agreement
from training.checkpoint.contents import Checkpoints
from training.checkpoint.folders import Saved
from training.config import Config, Load, TestRestore
from training.data.batches import Batches
from training.evaluation import Evaluation
from training.faults import Stopped, StopRequest
from training.huggingface import Exports
from training.metrics.meters import Meters
from training.metrics.writers import Writers
from training.ranks import Ranks
from training.schedule import Schedule
from training.seeds import seed_step
from training.spikes import Spike, Spikes, TooManySpikes
from training.status import State, Status
from training.step import Step
from training.watchdog import Watchdog
from training.windows import Windows

LONG_WAIT_SECONDS = 1.0  # of a save for the one before, that a warning is worth
LONG_RUN_SECONDS = 3600.0  # from here on checkpoint.test_restore=auto tests

log = logging.getLogger(__name__)


@dataclass
class Run:
    """All that takes part in the steps. Each member is the same kind of thing on every rank."""

    config: Config
    steps: int
    random_coordinate: int
    ranks: Ranks
    batches: Batches
    step: Step
    schedule: Schedule
    windows: Windows
    meters: Meters
    spikes: Spikes
    writers: Writers
    checkpoints: Checkpoints
    exports: Exports | None  # with checkpoint.export_hf
    evaluation: Evaluation
    stop: StopRequest
    status: Status
    agreement: Agreement | None  # with debug=paranoid
    watchdog: Watchdog | None  # with several ranks
    unwritten_scores: dict[str, Any] | None = None  # of the checkpoint that is being written
    step_begun: int = 0  # for the message when something fails
    proven: bool = False

    def progress(self) -> dict[str, Any]:
        """What a checkpoint has besides the state, for a run that goes on."""
        return {"tokens": self.meters.tokens, "skipped_steps": self.meters.skipped, "spikes": self.spikes.state()}


def train(run: Run, steps_done: int) -> Stopped | None:
    """Goes on from `steps_done` to the end. Returns the reason if it was asked to stop before all was done and scored;
    what was done is saved in any case.

    A step is known by its number from 1: checkpoint 5 has the weights after step 5.
    """
    gc.collect()
    gc.disable()  # a collection in one rank's step makes all wait; ours comes where they wait anyway
    run.step.progress.places = 0  # trials of micro-batches may have counted differently
    if run.watchdog is not None:
        run.watchdog.start()
    try:
        while True:
            end = train_on(run, steps_done)
            if not isinstance(end, Spike):
                return end
            steps_done = run.status.step
    finally:
        if run.watchdog is not None:
            run.watchdog.stop()
        gc.enable()


def train_on(run: Run, steps_done: int) -> Stopped | Spike | None:
    """The steps until the run ends, or has gone back to a checkpoint because of a spike."""
    batches = run.batches.iterate(steps_done, run.meters.tokens)
    progress = run.step.progress
    progress.step = steps_done + 1
    progress.at("reading the batch")
    try:
        for batch in batches:
            step, lr = batch.step + 1, run.schedule.lr(batch.step)
            first, last = not run.proven, step == run.steps
            run.step_begun = step
            progress.at("the beginning")
            seed_step(run.config.seed, batch.step, run.random_coordinate)
            run.windows.train(batch.step)
            run.meters.add(step, lr, run.step(batch.micro_batches, batch.predicted, lr, run.agreement))
            run.status.step = step

            progress.at("the end")
            if first:
                run.stop.watch_steps(run.ranks, run.checkpoints.ended)
            stopped = run.stop.poll()
            if run.stop.background_saves == run.checkpoints.begun:
                settle(run)
            kind = "final" if last else run.checkpoints.kind_due(step, run.stop.save_due)
            if stopped or kind or first or step % run.config.metrics.every == 0 or _is_scored(run, step, kind):
                spike = report(run, step)
                if spike is not None and go_back(run, spike):
                    return spike
            if first:
                prove(run, step)
            stopped = pause(run, step, kind, stopped)
            if last or stopped:
                settle(run)
                return stopped
            progress.step = step + 1
            progress.at("reading the batch")
        raise AssertionError("the batches ended before the run")
    finally:
        batches.close()


def _is_scored(run: Run, step: int, kind: str | None) -> bool:
    """Whether the suite runs after this step. kind: of the checkpoint that is saved then."""
    every = run.config.evals.every
    return kind in ("final", "scheduled") or (every > 0 and step % every == 0)


def report(run: Run, step: int) -> Spike | None:
    """Reads the steps since the last report from the device and writes them. Returns the first of them that is a spike,
    by rank 0's word. So no checkpoint is saved of a step that nobody has looked at."""
    run.step.progress.at("reading the metrics")
    records = [
        record | {"rollbacks": len(run.spikes.rollbacks)} for record in run.meters.read(run.batches.wait_seconds)
    ]
    run.writers.steps(records)
    run.meters.check_skipped(step)
    if run.config.spikes.threshold == 0:
        return None
    spike = run.ranks.first(run.spikes.find(records))
    if spike is not None:
        # if there is nothing to go back to
        run.spikes.accept([record for record in records if record["step"] >= spike.step])
    return spike


def restore(run: Run, saved: Saved) -> None:
    """Takes over all of a checkpoint."""
    written = run.ranks.first(run.spikes.written() if run.ranks.rank == 0 else [])
    run.checkpoints.restore(saved, Load.all)
    run.status.step = saved.info["step"]
    run.meters.tokens, run.meters.skipped = saved.info["tokens"], saved.info["skipped_steps"]
    run.spikes.load(saved.info.get("spikes"), written)
    run.batches.order = run.spikes.without(run.batches.order)
    run.status.rollbacks = len(run.spikes.rollbacks)


def go_back(run: Run, spike: Spike) -> bool:
    """Goes back to the newest checkpoint before the batches of the spike, and leaves them out from now on. Returns
    whether there is one. Raises TooManySpikes.

    Killed at any point, the run either knows of it when it starts again or meets the spike again."""
    config, order = run.config.spikes, run.batches.order
    if len(run.spikes.rollbacks) >= config.max_rollbacks:
        raise TooManySpikes(f"{spike}; the run has gone back {len(run.spikes.rollbacks)} times already")
    settle(run)
    there = run.checkpoints.store.all()
    before = [saved for saved in there if saved.step < spike.step - config.before]
    saved = next((saved for saved in reversed(before) if not run.checkpoints.store.verify(saved)), None)
    if saved is None:
        _warn(run, f"{spike}. There is no checkpoint from before it, so the run goes on")
        return False
    restore(run, saved)
    assert run.config.batch_sequences is not None
    rollback = run.spikes.rollback(spike, saved.step, saved.info["tokens"], order, run.config.batch_sequences)
    for later in there[there.index(saved) + 1 :]:
        run.checkpoints.store.remove(later)
    run.spikes.rollbacks.append(rollback)
    run.ranks.first_does(run.spikes.write)
    run.batches.order = run.spikes.without(order)
    run.writers.start(saved.step + 1)
    run.status.checkpoint, run.status.rollbacks = saved.step, len(run.spikes.rollbacks)
    if run.ranks.rank == 0:
        run.status.write(State.running)
    samples = f"samples {rollback.first:,} to {rollback.stop - 1:,} are left out"
    _warn(run, f"{spike}. Back to step {saved.step}: {samples} (rollback {run.status.rollbacks})")
    run.meters.restart_clock(run.batches.wait_seconds)
    return True


def _warn(run: Run, text: str) -> None:
    if run.ranks.rank == 0:
        log.warning("%s", text)


def prove(run: Run, step: int) -> None:
    """After the first step: what connects and compiles is done, so collectives may wait less long; and a run that is
    meant to last shows that what it saves can be read back."""
    run.proven = True
    meshes = [] if run.step.mesh is None else [run.step.mesh, *run.step.spread.views]
    shorten_timeouts(meshes, run.ranks.group, run.config.parallel.timeout_seconds)
    if run.watchdog is not None:
        run.watchdog.limit = run.config.parallel.timeout_seconds
    wanted = run.config.checkpoint.test_restore
    lasts = run.ranks.first(run.meters.last_step_seconds * (run.steps - step) > LONG_RUN_SECONDS)
    if wanted is TestRestore.always or (wanted is TestRestore.auto and lasts):
        saving, reading = run.checkpoints.test_restore(step, run.progress())
        told = f"saved in {saving:.1f} s, read back in {reading:.1f} s, equal bit by bit"
        run.writers.text("restore test", told, step)
        run.meters.restart_clock(run.batches.wait_seconds)


def pause(run: Run, step: int, kind: str | None, stopped: Stopped | None) -> Stopped | None:
    """What is done between two steps: save, then score. The weights are safe, or on their way, before an evaluation
    begins."""
    saved = save(run, step, kind) if kind else None
    scored = _is_scored(run, step, kind)
    if scored and not stopped:
        stopped = score(run, step, saved)
    if stopped and not kind:
        save(run, step, "signal")
    if kind or scored:
        gc.collect()
        run.meters.restart_clock(run.batches.wait_seconds)
    return stopped


def save(run: Run, step: int, kind: str) -> Saved | None:
    """Every step up to this one is in the metrics on disk before the checkpoint is complete. Returns None where it is
    written in the background; one that is being written already is waited for. Raises SaveFailed on every rank."""
    run.step.progress.at("saving")
    run.writers.flush()
    settle(run, before=step)
    began = time.perf_counter()
    saved = run.checkpoints.save(step, run.progress(), kind)
    run.stop.saved()
    run.meters.stalled(step + 1, time.perf_counter() - began)
    if saved is not None:
        complete(run, saved)
    return saved


def settle(run: Run, before: int | None = None) -> None:
    """Waits for the checkpoint that is being written in the background, if there is one, and does what follows from it.
    Raises SaveFailed on every rank. before: the step that is to be saved next."""
    step, began = run.checkpoints.saving, time.perf_counter()
    if step is None:
        return
    slow = before is not None and run.checkpoints.writes()
    saved = run.checkpoints.finish()
    assert saved is not None
    complete(run, saved)
    seconds = time.perf_counter() - began
    run.meters.stalled(run.status.step + 1, seconds)
    if slow and seconds >= LONG_WAIT_SECONDS:
        _warn(run, f"the save of step {before} waited {seconds:.1f} s for that of step {step}")


def complete(run: Run, saved: Saved) -> None:
    """What is done when all ranks know that a checkpoint is complete."""
    run.stop.note_save(saved.step, run.checkpoints.seconds)
    run.status.checkpoint = saved.step
    if run.unwritten_scores is not None:
        run.checkpoints.store.write_scores(saved, run.unwritten_scores)
        run.unwritten_scores = None
    if run.exports is not None and saved.permanent:
        run.exports.write(saved)
    if run.ranks.rank == 0:
        run.status.write(State.running)


def score(run: Run, step: int, saved: Saved | None) -> Stopped | None:
    """Runs the suite; the scores go to the writers and beside the checkpoint. Returns the reason if it was asked to
    stop meanwhile, and then there are no scores."""
    run.windows.evaluate()
    try:
        records = run.evaluation.score(step)
    except Stopped as stopped:
        return stopped
    run.writers.scores(records)
    if saved is not None and records:
        run.checkpoints.store.write_scores(saved, {"scores": records})
    elif records and run.checkpoints.saving == step:
        run.unwritten_scores = {"scores": records}
    return None
