"""A run, from a checked config to its exit code, in the order in which things happen."""

import logging
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from models.flops import flops_per_token, parameters
from parallel.apply import Spread, parallelize
from parallel.config import Dtype, Strategy
from parallel.mesh import build_mesh, data_coordinate, launched, start_process_group
from parallel.precision import settle
from training import finish, memory
from training.adopt import adopt, load_problems
from training.check import describe
from training.checkpoint.contents import Checkpoints, is_scored, model_state
from training.checkpoint.folders import Saved
from training.checkpoint.store import Store, find
from training.config import Config, Load, leaves
from training.data.batches import Batches
from training.data.order import Order
from training.data.prepare import Prepared, prepare
from training.evals.suite import Suite
from training.evaluation import Evaluation
from training.faults import Stopped, StopRequest
from training.files import write_json, write_text
from training.folder import RunFolder, claim
from training.loop import Run, score, train
from training.metrics import writers
from training.metrics.console import Console, final_table
from training.metrics.environment import environment
from training.metrics.meters import Meters, Speed
from training.metrics.throughput import no_peak, peak_flops
from training.metrics.writers import Jsonl, Writers
from training.optimizers.build import build_optimizer
from training.ranks import Ranks
from training.refusal import Problem, Refusal
from training.resolve import Chosen, World, resolve_epochs, resolve_model
from training.schedule import Schedule
from training.seeds import make_deterministic
from training.status import State, Status, command
from training.step import Step
from training.tokenizers import Tokenizer, build

FINISHED, SAVED = 0, 75


class Silent(Console):
    """Of the ranks that do not speak."""

    def say(self, text: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int, notes: Any = ()) -> None:
        pass


class _ToConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.warn(record.getMessage())


@dataclass
class Place:
    """Where this process runs, and to whom it speaks."""

    rank: int
    world: World
    device: torch.device
    folder: RunFolder
    console: Console
    status: Status
    stop: StopRequest
    ranks: Ranks
    mesh: DeviceMesh | None = None


@dataclass
class Text:
    """The data of the run."""

    tokenizer: Tokenizer
    prepared: Prepared


def run(config: Config, world: World, chosen: Chosen) -> int:
    """Trains, or scores a checkpoint with eval_only. Returns the exit code. Raises Refusal before anything is touched
    if this cannot start; any other exception is a failure, told in status.json and the log."""
    place = find_place(config, world)
    with place.stop.handlers():
        try:
            code = (
                score_checkpoint(config, chosen, place)
                if config.eval_only
                else train_from_config(config, chosen, place)
            )
        except Stopped as stopped:  # before the first step: there is nothing to save
            code = say_stopped(place, stopped, 0 if config.eval_only else None)
        except Refusal:
            raise
        except BaseException as error:
            tell_failure(place, error)
            raise
        finally:
            place.console.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return code


def find_place(config: Config, world: World) -> Place:
    """The device, the folder and the voice of this process. No process group yet, and nothing is written."""
    rank = int(os.environ.get("RANK", "0"))
    wanted = config.hardware.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            [Problem("hardware.device", "cuda", "torch finds no CUDA device here", "hardware.device=cpu, or auto")]
        )
    on_gpu = wanted != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if config.deterministic:
        make_deterministic()
    assert config.name is not None
    folder = RunFolder(config.out, config.name)
    console = Console() if rank == 0 else Silent()
    logging.getLogger("training").handlers = [_ToConsole(console)]
    logging.getLogger("training").propagate = False
    return Place(
        rank,
        world,
        device,
        folder,
        console,
        Status(folder.status_path, command()),
        StopRequest(config.max_minutes),
        Ranks.alone(),
    )


def train_from_config(config: Config, chosen: Chosen, place: Place) -> int:
    began = time.perf_counter()
    saved = open_folder(config, chosen, place)
    if saved is not None and saved.step == config.steps and is_scored(Store(saved.folder.parent, Ranks.alone()), saved):
        return show_finished(config, place)
    text = read_text(config, place)
    connect(config, place)
    run = assemble(config, chosen, place, text)
    try:
        steps_done, stopped = restore(run, place, began)
        if stopped is None and steps_done < run.steps:
            stopped = train(run, steps_done)
        if stopped is None:
            end(run, place, text)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        step = run.step
        place.console.warn(
            memory.out_of_memory_report(config, place.rank, step.phase, step.parameters, step.optimizer, place.device)
        )
        raise
    finally:
        run.writers.close()
    if stopped is not None:
        return say_stopped(place, stopped, run.last_saved_step)
    return FINISHED


# What follows is the parts of the above, in its order.


def open_folder(config: Config, chosen: Chosen, place: Place) -> Saved | None:
    """Decides what may be done with the run's folder; its newest checkpoint if the run goes on. Raises Refusal."""
    folder = place.folder
    if config.checkpoint.dir is None:
        config.checkpoint.dir = str(folder.checkpoints)
    saved = Store(Path(config.checkpoint.dir), Ranks.alone()).newest()
    theirs = saved.info["config"] if saved is not None else folder.saved_config()
    claimed = claim(
        folder, config, _with_unresolved(theirs or {}, config, chosen) if theirs else None, saved is not None
    )
    problems = list(claimed.problems) + (writers.problems(config.metrics) if place.rank == 0 else [])
    if config.checkpoint.load is not None and saved is None:
        problems += load_problems(config, find(config.checkpoint.load, Ranks.alone()))
    if place.rank == 0 and not problems:
        problems += folder.hold()
    if problems:
        raise Refusal(problems)
    if place.rank == 0:
        place.console.log = folder.log_path
        place.status.write(State.running, saved.step if saved is not None else 0)
        for difference in claimed.changed:
            place.console.say(f"changed since the last start: {difference}")
    return saved


def _with_unresolved(saved: dict[str, Any], config: Config, chosen: Chosen) -> dict[str, Any]:
    """The saved config; where it has the text of a value from the environment, and so has this command, the value
    counts as equal."""
    now = leaves(config)
    return {
        key: now[key] if key in now and chosen.unresolved.get(key) == value else value for key, value in saved.items()
    }


def show_finished(config: Config, place: Place) -> int:
    """For a finished run that is started again."""
    place.console.say(finish.result(place.folder.path, {}))
    place.console.say(finish.next_ways(config, place.folder.path, place.status.command))
    return FINISHED


def read_text(config: Config, place: Place) -> Text:
    """Tokenizer and tokens; what of the config depends on them is filled in."""
    tokenizer = build(config.tokenizer)
    prepared = prepare(config.data, tokenizer, place.console.progress)
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    problems = []
    if config.model.vocab_size < tokenizer.vocab_size:
        reason = f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens"
        problems.append(
            Problem("model.vocab_size", config.model.vocab_size, reason, f"model.vocab_size={tokenizer.vocab_size}")
        )
    if len(prepared.train) == 0 and not config.eval_only:
        problems.append(
            Problem(
                "data",
                config.data.kind.name,
                "there is no text to train on",
                "other data.files, or a smaller data.heldout",
            )
        )
    if problems:
        raise Refusal(problems)
    resolve_epochs(config, len(prepared.train))
    return Text(tokenizer, prepared)


def connect(config: Config, place: Place) -> None:
    """The process group and the mesh. A single device has neither."""
    if config.parallel.strategy is Strategy.single:
        return
    group = start_process_group(place.device, config.parallel.timeout_seconds)
    place.ranks = Ranks(group)
    place.mesh = build_mesh(config.parallel, place.device)


def spread_model(config: Config, place: Place, dtype: Dtype) -> Spread:
    return parallelize(
        config.model,
        place.mesh,
        config.parallel,
        dtype,
        config.precision.reduce_dtype,
        config.compile,
        config.seed,
        place.device,
    )


def assemble(config: Config, chosen: Chosen, place: Place, text: Text) -> Run:
    """Builds everything that takes part in the steps."""
    dtype = settle(config.precision, place.device)
    spread = spread_model(config, place, dtype)
    optimizer = build_optimizer(config.optimizer, spread.model)
    step = Step(spread, place.mesh, optimizer, config.optimizer.clip)
    data_rank, data_ranks = data_coordinate(place.mesh)
    assert config.steps is not None and config.sequence_length is not None and config.batch_sequences is not None
    assert config.checkpoint.dir is not None and config.name is not None
    if config.micro_batch == "auto":
        config.micro_batch = fit_micro_batch(config, place, step, config.batch_sequences // data_ranks)
    assert isinstance(config.micro_batch, int)
    order = Order(
        len(text.prepared.train), config.sequence_length, config.seed, config.data.shuffle, config.data.shuffle_block
    )
    batches = Batches(
        text.prepared.train,
        order,
        config.batch_sequences,
        config.micro_batch,
        data_rank,
        data_ranks,
        place.device,
        config.data.prefetch,
    )
    step_tokens = config.batch_sequences * config.sequence_length
    speed = speed_of(config, place, dtype, step_tokens)
    suite = Suite(config.evals, text.prepared, text.tokenizer, config.sequence_length)
    machine = environment()
    about: dict[str, Any] = {
        "config": leaves(config) | chosen.unresolved,
        "tokenizer": {"name": text.tokenizer.name, "fingerprint": text.tokenizer.fingerprint},
        "versions": {"espalier": machine["espalier"], "python": machine["python"], **machine["packages"]},
        "ranks": place.world.ranks,
    }
    store = Store(Path(config.checkpoint.dir), place.ranks)
    if place.rank == 0:
        write_text(place.folder.config_path, describe(config, chosen))
        write_json(place.folder.environment_path, machine)
        sinks = writers.build(
            config.metrics, place.folder.path, place.console, config.name, config.steps, about["config"]
        )
        introduce(config, place, text, dtype, spread, step, suite)
    else:
        sinks = Writers([])
    return Run(
        config=config,
        steps=config.steps,
        step_tokens=step_tokens,
        data_rank=data_rank,
        ranks=place.ranks,
        batches=batches,
        step=step,
        schedule=Schedule(config.schedule, config.optimizer.lr, config.steps, step_tokens),
        meters=Meters(place.mesh, place.device, speed, config.optimizer.max_skipped),
        writers=sinks,
        checkpoints=Checkpoints(store, config.checkpoint, spread.model, optimizer, about),
        evaluation=Evaluation(suite, spread, place.mesh, place.ranks, place.device, place.stop.check),
        stop=place.stop,
    )


def fit_micro_batch(config: Config, place: Place, step: Step, sequences: int) -> int:
    """The largest micro-batch of this model that fits on every rank."""
    length = config.sequence_length
    assert length is not None

    def probe(count: int) -> None:
        tokens = torch.zeros(count, length, dtype=torch.long, device=place.device)
        step.backward([{"tokens": tokens, "labels": tokens}], tokens.numel())
        step.optimizer.zero_grad()

    found = memory.largest_micro_batch(probe, sequences, place.device, place.world.ranks_per_host, place.ranks)
    place.console.say(f"micro_batch=auto: {found} of {sequences} sequences of a rank fit at once")
    return found


def speed_of(config: Config, place: Place, dtype: Dtype, step_tokens: int) -> Speed:
    assert config.sequence_length is not None
    flops = flops_per_token(config.model, config.sequence_length)
    if config.hardware.peak_tflops is not None:
        peak: float | None = config.hardware.peak_tflops * 1e12
    elif place.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(place.device), dtype.name)
    else:
        peak = None
    return Speed(step_tokens, place.world.ranks, flops, peak)


def introduce(config: Config, place: Place, text: Text, dtype: Dtype, spread: Spread, step: Step, suite: Suite) -> None:
    """What is about to be done, in a few lines."""
    say, manifest = place.console.say, text.prepared.manifest
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
    degrees = {axis: size for axis in ("dp_replicate", "dp_shard") if (size := getattr(config.parallel, axis)) > 1}
    layout = ", ".join([config.parallel.strategy.name, *(f"{axis} {size}" for axis, size in degrees.items())])
    say(
        f"run {place.folder.path}: {parameters(config.model):,} parameters, {dtype.name}, compile {spread.compiled.name}"
    )
    say(f"  on {place.world.ranks} x {name}: {layout}; micro_batch {config.micro_batch}")
    say(
        f"  data {config.data.kind.name}: {len(text.prepared.train):,} tokens to train on, {len(text.prepared.heldout):,} held out"
    )
    for group in step.optimizer.groups:
        say(f"  {config.optimizer.kind.name}: {group}")
    for note in suite.notes:
        say(f"  evals: {note}")
    if place.device.type == "cuda" and speed_of(config, place, dtype, 1).peak_flops is None:
        say(f"  {no_peak(name, dtype.name)}")
    if manifest.get("skipped"):
        say(f"  data skipped: {manifest['skipped']}")


def restore(run: Run, place: Place, began: float) -> tuple[int, Stopped | None]:
    """Loads the newest checkpoint, or what checkpoint.load names; scores it first if it should have been. Returns the
    steps done."""
    store, config = run.checkpoints.store, run.config.checkpoint
    saved = store.newest()
    parts = Load.all
    if saved is None and config.load is not None:
        saved, parts = find(config.load, place.ranks), config.load_parts
    steps_done = 0
    if saved is not None:
        run.checkpoints.restore(saved, parts)
        if parts is Load.all:
            steps_done, run.meters.skipped = saved.info["step"], saved.info.get("skipped_steps", 0)
        place.console.say(f"{'goes on' if parts is Load.all else 'starts'} from {saved.folder}, step {saved.step:,}")
    run.writers.start(steps_done + 1)
    place.console.say(f"  ready {time.perf_counter() - began:.1f} s after the checks")
    own = saved is not None and saved.folder.parent == store.folder
    if saved is not None and own and not is_scored(store, saved):
        run.stop.watch_steps(run.ranks)
        run.last_saved_step = steps_done
        return steps_done, score(run, steps_done, saved)
    return steps_done, None


def end(run: Run, place: Place, text: Text) -> None:
    """The finished model's text and table."""
    if run.config.metrics.sample_tokens > 0:
        written = finish.sample(run.config, run.step.spread, text.tokenizer, place.device)
        run.writers.text("sample", written, run.steps)
    if place.rank == 0:
        place.status.write(State.finished, run.steps, FINISHED)
        others = finish.references(run.config, text.prepared, text.tokenizer)
        place.console.say(finish.result(place.folder.path, others))
        place.console.say(finish.next_ways(run.config, place.folder.path, place.status.command))


def say_stopped(place: Place, stopped: Stopped, step: int | None) -> int:
    """Tells how to go on. Under torchrun the code is 0: another would make it restart the run."""
    code = FINISHED if launched() else SAVED
    done = "nothing new to save" if step is None else f"saved at step {step:,}"
    place.console.close()
    place.console.say(f"stopped by {stopped.cause}: {done}\n  go on: {place.status.command}")
    if place.rank == 0 and place.folder.path.exists():
        place.status.write(State.saved, step or 0, code, f"stopped by {stopped.cause}")
    return code


def tell_failure(place: Place, error: BaseException) -> None:
    """Leaves the reason in the rank's log and in status.json."""
    if not place.folder.path.exists():
        return
    log = place.folder.log_path if place.rank == 0 else place.folder.rank_log_path(place.rank)
    with open(log, "a") as file:
        file.write(traceback.format_exc())
    message = f"rank {place.rank}: {type(error).__name__}: {error}"
    place.status.fail(message)


def score_checkpoint(config: Config, chosen: Chosen, place: Place) -> int:
    """eval_only: scores the checkpoint again, with the model, tokenizer and data it was trained with."""
    assert config.checkpoint.load is not None
    saved = find(config.checkpoint.load, Ranks.alone())
    adopt(config, saved, chosen.given)
    resolve_model(config)
    text = read_text(config, place)
    if text.tokenizer.fingerprint != saved.info["tokenizer"]["fingerprint"]:
        reason = f"this tokenizer is not the one {saved.folder} was trained with"
        raise Refusal([Problem("tokenizer", text.tokenizer.name, reason, "the same tokenizer files")])
    connect(config, place)
    spread = spread_model(config, place, settle(config.precision, place.device))
    assert config.sequence_length is not None
    suite = Suite(config.evals, text.prepared, text.tokenizer, config.sequence_length)
    Store(saved.folder.parent, place.ranks).load(saved, model_state(spread.model))
    place.console.say(f"scoring {saved.folder}")
    place.stop.watch_steps(place.ranks)
    found = Evaluation(suite, spread, place.mesh, place.ranks, place.device, place.stop.check).score(saved.step)
    if place.rank == 0:
        place.folder.path.mkdir(parents=True, exist_ok=True)
        Jsonl(place.folder.path).scores(found)
        others = finish.references(config, text.prepared, text.tokenizer)
        place.console.say(final_table(found, others))
    return FINISHED
