"""A run, from a checked config to its exit code, in the order in which things happen."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parallel.mesh import launched
from parallel.precision import settle
from parallel.replicas import ReplicasDiffer
from parallel.values import WrongValues
from training import finish
from training.adopt import adopt, load_problems
from training.build import Text, assemble, build_suite, check_same_text, read_text, spread_model
from training.check import check
from training.checkpoint.contents import is_scored, load_model
from training.checkpoint.folders import Saved
from training.checkpoint.remote import Folder, folder_at
from training.checkpoint.store import SaveFailed, Store, find, find_intact
from training.config import Config, HealthCheck, Load
from training.data.batches import BatchFailed
from training.evaluation import Evaluation
from training.faults import Stopped
from training.folder import RunFolder, claim
from training.health import BadHost, check_health
from training.huggingface import export_problem, load_folder
from training.loop import Run, restore, score, train
from training.memory import OutOfMemory, is_out_of_memory, out_of_memory_report
from training.metrics import writers
from training.metrics.console import final_table
from training.metrics.meters import TooManySkipped
from training.metrics.writers import METRICS_FILE, Jsonl
from training.place import (
    FAILED,
    FINISHED,
    Place,
    connect,
    disconnect,
    find_place,
    say_stopped,
    tell_failure,
    tell_refusal,
)
from training.ranks import Ranks
from training.refusal import Problem, Refusal, refuse
from training.resolve import Chosen, World
from training.spikes import TooManySpikes
from training.status import State
from training.tokenizers import Tokenizer
from training.unresolved import saved_values

Act = Callable[[Config, Chosen, Place], int]
# failures whose message says all; no traceback
EXPLAINED = (
    BadHost,
    BatchFailed,
    OutOfMemory,
    ReplicasDiffer,
    SaveFailed,
    TooManySkipped,
    TooManySpikes,
    WrongValues,
)


def run(config: Config, world: World, chosen: Chosen) -> int:
    """Trains, or scores a checkpoint with eval_only. Returns the exit code. Raises Refusal if this cannot start; what
    else it raises is a failure, told in status.json and the log."""
    place = find_place(config, world)
    act: Act = score_checkpoint if config.eval_only else train_from_config
    if launched():
        act = _recorded(act)
    with place.stop.handlers():
        try:
            return act(config, chosen, place)
        except Stopped as stopped:  # before the first step: there is nothing to save
            return say_stopped(place, stopped, None)
        except Refusal as refusal:
            tell_refusal(place, refusal)
            raise
        except EXPLAINED as failure:
            tell_failure(place, failure)
            if launched():
                raise
            place.console.close()
            place.console.warn(str(failure))
            return FAILED
        except BaseException as error:
            tell_failure(place, error)
            raise
        finally:
            place.console.close()
            place.folder.release()


def _recorded(act: Act) -> Act:
    """So that torchrun's summary shows the first failing rank's exception; but not a refusal, which says all itself."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def acted(config: Config, chosen: Chosen, place: Place) -> int | Refusal:
        try:
            return act(config, chosen, place)
        except Refusal as refusal:
            return refusal

    recorded = record(acted)

    def call(config: Config, chosen: Chosen, place: Place) -> int:
        found = recorded(config, chosen, place)
        if isinstance(found, Refusal):
            raise found
        return FINISHED if found is None else found

    return call


def train_from_config(config: Config, chosen: Chosen, place: Place) -> int:
    began = time.perf_counter()
    text = read_text(config, place)
    refuse(check(config, place.world))  # again: some lengths are only known with the data
    if config.checkpoint.export_hf and (why := export_problem(config.model)):
        refuse([Problem("checkpoint.export_hf", True, why, "checkpoint.export_hf=false")])
    saved = open_folder(config, place, text)
    connect(config, place)
    saved = place.ranks.first(saved)  # another rank may have listed the folder too early
    if saved is not None and saved.step == config.steps and is_scored(Store(saved.folder.parent, place.ranks), saved):
        place.console.say(finish.result(place.folder.path, {}))
        place.console.say(finish.next_ways(config, place.folder, place.status.command))
        if place.rank == 0:
            place.status.write(State.finished, FINISHED)
        disconnect()
        return FINISHED
    check_same_text(place, text)
    try_hardware(config, place)
    run = assemble(config, chosen, place, text)
    try:
        stopped = go(run, place, began)
        if stopped is None:
            end(run, place, text)
    except ReplicasDiffer as error:
        raise ReplicasDiffer(f"in step {run.step_begun} {error}") from error
    except (RuntimeError, torch.OutOfMemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(out_of_memory_report(config, place.rank, run.step, place.device)) from error
        error.add_note(
            f"on rank {place.rank}, after step {run.step_begun - 1} and before the end of step {run.step_begun}"
        )
        raise
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt):
            run.checkpoints.leave(config.parallel.timeout_seconds)
        run.writers.close()
    disconnect()
    code = FINISHED if stopped is None else say_stopped(place, stopped, run.status.checkpoint)
    if run.checkpoints.mirror is not None:
        place.console.say(f"waiting for the copies at {config.checkpoint.mirror}")
        run.checkpoints.mirror.finish()
    return code


def try_hardware(config: Config, place: Place) -> None:
    """Names a bad host before the run depends on it. Raises BadHost."""
    wanted = config.hardware.health_check
    if wanted is HealthCheck.always or (wanted is HealthCheck.auto and place.device.type == "cuda"):
        told, warnings = check_health(place.device, place.ranks, config.hardware.slow_factor)
        place.console.say(f"  {told}")
        for warning in warnings if place.rank == 0 else []:
            place.console.warn(warning)


def open_folder(config: Config, place: Place, text: Text) -> Saved | None:
    """Decides what may be done with the run's folder; its newest checkpoint if the run goes on. Raises Refusal."""
    assert config.steps is not None
    folder, steps = place.folder, config.steps
    saved = newest_of("checkpoint.dir", folder.checkpoints)
    info = saved.info if saved is not None else folder.saved_info()
    claimed = claim(folder, config, info and saved_values(info, config), saved is not None)
    problems = claimed.problems + writers.problems(config.metrics)
    if saved is None and config.checkpoint.mirror is not None:
        problems += only_copies(config.checkpoint.mirror, folder)
    if saved is not None:
        problems += text_problems(config, saved, text)
        if saved.step > steps and "steps" not in {problem.key for problem in problems}:
            instead = f"steps={saved.step} or more, or name=<another> for a new run"
            problems.append(too_short(steps, saved, instead))
    elif config.checkpoint.load is not None:
        loaded = find(config.checkpoint.load, Ranks.alone())
        problems += load_problems(config, loaded) + tokenizer_problems(loaded, text.tokenizer)
        if config.checkpoint.load_parts is Load.all and loaded.step >= steps:
            instead = f"steps={2 * loaded.step}, or checkpoint.load_parts=weights to begin at step 1"
            problems.append(too_short(steps, loaded, instead))
    if place.rank == 0 and not problems:
        problems += folder.hold() or folder.hold_checkpoints()
    refuse(problems)
    place.claimed = True
    if saved is not None:
        place.status.step = place.status.checkpoint = saved.step
    if place.rank == 0:
        place.console.log = folder.log_path
        place.status.write(State.running)
        for difference in claimed.changed:
            place.console.say(f"changed since the last start: {difference}")
    return saved


def newest_of(key: str, checkpoints: Folder) -> Saved | None:
    """The newest complete checkpoint. Raises Refusal where one cannot look."""
    try:
        return Store(checkpoints, Ranks.alone()).newest()
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise Refusal([Problem(key, checkpoints, reason, f"{key}=<a folder or URL that can be read>")]) from error


def only_copies(mirror: str, folder: RunFolder) -> list[Problem]:
    """A run whose checkpoints are lost here is not begun anew over their copies."""
    saved = newest_of("checkpoint.mirror", folder_at(mirror))
    if saved is None:
        return []
    reason = f"has step {saved.step:,} of a run, and {folder.checkpoints} has no checkpoint"
    instead = f"`python -m scripts.checkpoints copy {mirror} {folder.checkpoints}` to go on, or another mirror"
    return [Problem("checkpoint.mirror", mirror, reason, instead)]


def tokenizer_problems(saved: Saved, tokenizer: Tokenizer) -> list[Problem]:
    """The ids of a checkpoint's model mean what its own tokenizer says."""
    if tokenizer.fingerprint == saved.info["tokenizer"]["fingerprint"]:
        return []
    reason = f"this tokenizer is not the one {saved.folder} was trained with"
    return [Problem("tokenizer", tokenizer.name, reason, "the same tokenizer, with the same files")]


def text_problems(config: Config, saved: Saved, text: Text) -> list[Problem]:
    """A run goes on with the text it began with."""
    problems = tokenizer_problems(saved, text.tokenizer)
    now = text.prepared.folder.name
    allowed = any(key.startswith("data.") for key in config.checkpoint.allow_changes)
    if not problems and saved.info["data"] != now and not allowed:
        reason = f"the text is another than the one {saved.folder} was trained on, and the order of samples with it"
        instead = "the same text, or name=<another>, or to go on all the same checkpoint.allow_changes=[data.kind]"
        problems.append(Problem("data", config.data.kind.name, reason, instead))
    return problems


def too_short(steps: int, saved: Saved, instead: str) -> Problem:
    return Problem("steps", steps, f"{saved.folder} has {saved.step:,} steps already", instead)


def go(run: Run, place: Place, began: float) -> Stopped | None:
    """Restores what there is, scores it if it should have been, and trains to the end."""
    store = run.checkpoints.store
    saved, parts = store.newest_intact(), Load.all
    own = saved is not None
    if saved is None and run.status.checkpoint is not None:
        reason = f"each of its checkpoints is damaged, and begun anew the run would replace {place.folder.path}"
        raise Refusal([Problem("checkpoint.dir", store.folder, reason, "name=<another> for a new run")])
    run.status.checkpoint = saved.step if saved is not None else None
    if saved is None and run.config.checkpoint.load is not None:
        saved, parts = find_intact(run.config.checkpoint.load, place.ranks), run.config.checkpoint.load_parts
    steps_done = 0
    if saved is None and run.config.model.init_from is not None:
        load_folder(run.step.spread, Path(run.config.model.init_from))
        place.console.say(f"starting from {run.config.model.init_from}")
    if saved is not None:
        if parts is Load.all:
            restore(run, saved)
            steps_done = run.status.step
        else:
            run.checkpoints.restore(saved, parts)
        place.console.say(f"{'going on' if parts is Load.all else 'starting'} from {saved.folder}")
        if run.meters.tokens % run.batches.order.sequence_length != 0:
            place.console.say("  sequence_length has changed: the data goes on at the next whole sequence")
    run.writers.start(steps_done + 1)
    place.console.say(f"  ready in {time.perf_counter() - began:.1f} s")
    if saved is not None and own and not is_scored(store, saved):
        run.stop.watch_steps(run.ranks)
        stopped = score(run, steps_done, saved)
        if stopped is not None:
            return stopped
    return train(run, steps_done) if steps_done < run.steps else None


def end(run: Run, place: Place, text: Text) -> None:
    """The finished model's text and table."""
    if run.config.metrics.sample_tokens > 0:
        written = finish.sample(run.config, run.step.spread, text.tokenizer, place.device)
        run.writers.text("sample", written, run.steps)
    if place.rank == 0:
        others = finish.references(run.config, text.prepared, text.tokenizer)
        place.status.write(State.finished, FINISHED)
        place.console.say(finish.result(place.folder.path, others))
        place.console.say(finish.next_ways(run.config, place.folder, place.status.command))


def claim_scores(chosen: Chosen, place: Place, saved: Saved) -> None:
    """The folder of scores made again, <run>-scored where no name is given; never one in which a run trained. Raises
    Refusal."""
    if "name" not in chosen.given:
        owner = saved.folder.parent.parent if saved.folder.parent.name == "checkpoints" else saved.folder
        place.folder = RunFolder(str(place.folder.path.parent), f"{owner.name}-scored")
    if place.rank == 0:
        if (place.folder.path / METRICS_FILE).exists():
            reason = f"{place.folder.path} is the folder of a run, whose scores these would replace"
            raise Refusal([Problem("name", place.folder.name, reason, f"name={place.folder.name}-scored")])
        refuse(place.folder.hold())


def score_checkpoint(config: Config, chosen: Chosen, place: Place) -> int:
    """eval_only: scores the checkpoint again, with the model, tokenizer and data it was trained with."""
    assert config.checkpoint.load is not None
    saved = find(config.checkpoint.load, Ranks.alone())
    refuse(adopt(config, saved, chosen.given))
    refuse(load_problems(config, saved))
    refuse(check(config, place.world))
    text = read_text(config, place)
    refuse(tokenizer_problems(saved, text.tokenizer))
    if saved.info["data"] != text.prepared.folder.name:
        place.console.warn(f"the held-out text is not the one {saved.folder} was scored on before")
    claim_scores(chosen, place, saved)
    connect(config, place)
    spread = spread_model(config, place, settle(config.precision, place.device, place.ranks.all))
    suite = build_suite(config, place, text, spread)
    store = Store(saved.folder.parent, place.ranks)
    if faults := store.verify(saved):
        reason = f"{saved.folder} is damaged: {'; '.join(faults)}"
        raise Refusal([Problem("checkpoint.load", config.checkpoint.load, reason, "another checkpoint")])
    load_model(store, saved, spread)
    place.console.say(f"scoring {saved.folder}")
    found = Evaluation(suite, spread, place.mesh, place.ranks, place.device, place.stop.check, text.apart).score(
        saved.step
    )
    if place.rank == 0 and found:
        Jsonl(place.folder.path).scores(found)
        place.console.say(final_table(found, finish.references(config, text.prepared, text.tokenizer)))
    disconnect()
    return FINISHED
