"""Everything that takes part in the steps, built from the config in the order in which things depend on each other."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from models.flops import flops_per_token, parameters
from parallel.apply import Spread, parallelize
from parallel.config import UNCOMPRESSED, Dtype, Scope
from parallel.mesh import FIRST_STEP_PATIENCE, data_coordinate, random_coordinate
from parallel.precision import settle
from parallel.recomputation import told
from training import memory
from training.advice import Device, advice
from training.agreement import Agreement
from training.attention import attention_of
from training.bubble import bubble_told
from training.check import check, describe
from training.checkpoint.background import Background
from training.checkpoint.contents import Checkpoints, policy_of
from training.checkpoint.mirror import Mirror
from training.checkpoint.remote import folder_at
from training.checkpoint.store import Store
from training.config import CheckpointConfig, Config, Debug, leaves
from training.data.batches import Batches
from training.data.order import Order
from training.data.packing import packed
from training.data.prepare import Prepared, prepare
from training.evals.suite import Suite
from training.evaluation import Evaluation
from training.files import write_json, write_text
from training.huggingface import Exports
from training.loop import Run
from training.metrics import writers
from training.metrics.compilation import Compilations, Watched, expect, recompiles
from training.metrics.environment import environment
from training.metrics.meters import Meters, Speed
from training.metrics.throughput import no_peak, peak_flops
from training.metrics.writers import Writers
from training.optimizers.build import build_optimizer
from training.place import Place, tell_hang
from training.plan import axes_table, counts_told, settle_activations, stages_table, unplanned
from training.refusal import Problem, Refusal
from training.resolve import DEGREES, Chosen, data_ranks, rank_sequences, resolve_epochs
from training.schedule import Schedule
from training.spikes import Spikes
from training.step import Step
from training.tokenizers import Tokenizer, build
from training.unresolved import digests
from training.watchdog import Watchdog
from training.windows import Windows


@dataclass
class Text:
    """The data of the run."""

    tokenizer: Tokenizer
    prepared: Prepared
    apart: int | None
    """The end-of-text token at which documents are kept apart; None where they are not."""


def read_text(config: Config, place: Place) -> Text:
    """Tokenizer and tokens; what of the config depends on them is filled in. Raises Refusal."""
    tokenizer = build(config.tokenizer)
    prepared = prepare(config.data, tokenizer, place.console.progress)
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    problems = []
    if config.model.vocab_size < tokenizer.vocab_size:
        reason, instead = f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens", tokenizer.vocab_size
        problems.append(
            Problem("model.vocab_size", config.model.vocab_size, reason, f"model.vocab_size={instead}, or null")
        )
    if len(prepared.train) == 0 and not config.eval_only:
        reason = "there is no text to train on"
        problems.append(Problem("data", config.data.kind.name, reason, "other data.files, or a smaller data.heldout"))
    if problems:
        raise Refusal(problems)
    resolve_epochs(config, len(prepared.train))
    return Text(tokenizer, prepared, tokenizer.end_of_text if config.data.mask_documents else None)


def spread_model(config: Config, place: Place, dtype: Dtype) -> Spread:
    kernel, _ = attention_of(config, place.device, dtype)
    spread = parallelize(
        replace(config.model, attention=kernel),
        place.mesh,
        config.parallel,
        dtype,
        config.precision.reduce_dtype,
        config.compile,
        config.activations,
        config.seed,
        place.device,
        config.optimizer.sums if not config.eval_only else UNCOMPRESSED,
    )
    if spread.compiled is Scope.none:
        return spread
    return Watched(**vars(spread), compilations=Compilations(place.console.say, place.console.warn))


def build_suite(config: Config, place: Place, text: Text, spread: Spread) -> Suite:
    """The suite; of a compiled model in as few shapes as compile.dynamic says, in widths that can be cut over
    ranks."""
    assert config.sequence_length is not None
    one_shape = spread.compiled is not Scope.none and not config.compile.dynamic
    suite = Suite(
        config.evals, text.prepared, text.tokenizer, config.sequence_length, one_shape, config.parallel.sequence_cuts
    )
    for shape in suite.shapes(data_ranks(config)):
        expect(spread, "evaluation batches", shape, gradients=False)
    return suite


def check_same_text(place: Place, text: Text) -> None:
    """Refuses hosts that prepared different tokens, such as other versions of Python's standard library."""
    names = place.ranks.gather(text.prepared.folder.name)
    if len(set(names)) > 1:
        reason = f"rank {names.index(next(n for n in names if n != names[0]))} has other text than rank 0"
        instead = "the same files (for stdlib: the same Python) on every host"
        raise Refusal([Problem("data", text.prepared.folder.name, reason, instead)])


def assemble(config: Config, chosen: Chosen, place: Place, text: Text) -> Run:
    """A run that is ready for `restore` and its steps. Rank 0 leaves config.yaml and environment.json in the folder."""
    assert config.steps is not None and config.sequence_length is not None and config.batch_sequences is not None
    dtype = settle(config.precision, place.device, place.ranks.all)
    if why := settle_activations(config, dtype, least_memory(config, place, dtype)):
        place.console.say(why)
    spread = spread_model(config, place, dtype)
    step = Step(spread, place.mesh, build_optimizer(config.optimizer, spread.model), config.optimizer.clip)
    speed = speed_of(config, place, dtype, config.batch_sequences * config.sequence_length)
    suite = build_suite(config, place, text, spread)
    if config.micro_batch == "auto":
        config.micro_batch = fit_micro_batch(config, place, step, text.apart)
        if problems := check(config, place.world):  # again, with the number of micro-batches
            raise Refusal(problems)
    assert isinstance(config.micro_batch, int)
    expect(spread, "micro-batches", (config.micro_batch, config.sequence_length), gradients=True)
    about = describe_run(config, chosen, place, text.tokenizer, text.prepared.folder.name)
    if place.rank == 0:
        write_text(place.folder.config_path, describe(config, chosen))
        write_json(place.folder.environment_path, environment() | {"from_environment": about["from_environment"]})
        write_json(place.folder.data_path, text.prepared.manifest)
        introduce(config, place, text, dtype, spread, step, suite)

    def between_batches() -> None:
        step.progress.at("scoring")
        place.stop.check()

    return Run(
        config=config,
        steps=config.steps,
        random_coordinate=random_coordinate(place.mesh),
        ranks=place.ranks,
        batches=build_batches(config, place, text),
        step=step,
        schedule=Schedule(config.schedule, config.optimizer.lr, config.steps, speed.step_tokens),
        windows=Windows(spread, config.steps),
        meters=Meters(
            place.mesh,
            place.device,
            speed,
            config.optimizer.max_skipped,
            lambda: recompiles(spread),
            spread.pipeline.bubble_share if spread.pipeline is not None else None,
            config.model if config.model.moe.experts > 0 else None,
        ),
        spikes=Spikes(config.spikes, place.folder.rollbacks_path),
        writers=build_writers(config, place, about["config"]),
        checkpoints=Checkpoints(
            Store(place.folder.checkpoints, place.ranks),
            config.checkpoint,
            spread,
            step.optimizer,
            about,
            build_mirror(config.checkpoint, place),
            Background(place.saving, place.device) if place.saving is not None else None,
        ),
        exports=Exports(place.folder.path / "huggingface", text.tokenizer, place.ranks)
        if config.checkpoint.export_hf
        else None,
        evaluation=Evaluation(suite, spread, place.mesh, place.ranks, place.device, between_batches, text.apart),
        stop=place.stop,
        status=place.status,
        agreement=Agreement(spread.model, place.mesh, step.optimizer) if config.debug is Debug.paranoid else None,
        watchdog=build_watchdog(config, place, step),
    )


def build_watchdog(config: Config, place: Place, step: Step) -> Watchdog | None:
    """None on a single device, which waits for nobody."""
    if place.ranks.size == 1:
        return None
    pipeline = step.spread.pipeline
    return Watchdog(
        place.rank,
        place.ranks.size,
        step.progress,
        (lambda: 0) if pipeline is None else lambda: pipeline.clock.begun,
        config.parallel.timeout_seconds * FIRST_STEP_PATIENCE,
        place.folder.hang_path,
        partial(tell_hang, place),
    )


def build_mirror(config: CheckpointConfig, place: Place) -> Mirror | None:
    if config.mirror is None or place.rank != 0:
        return None
    return Mirror(place.folder.checkpoints, folder_at(config.mirror), policy_of(config))


def fit_micro_batch(config: Config, place: Place, step: Step, apart: int | None) -> int:
    """The largest micro-batch of this model that fits on every rank. apart: as Text's."""
    assert config.sequence_length is not None and config.batch_sequences is not None
    length, sequences = config.sequence_length, rank_sequences(config.batch_sequences, data_ranks(config))

    def probe(count: int) -> None:
        tokens = torch.zeros(count, length, dtype=torch.long, device=place.device)
        expect(step.spread, "trial micro-batches", (count, length), gradients=True)
        inputs = {"tokens": tokens, "labels": tokens.clone()} | ({} if apart is None else packed(tokens, apart))
        step.backward([inputs], tokens.numel())
        step.zero_grad()

    found = memory.largest_micro_batch(probe, sequences, place.device, place.world.ranks_per_host, place.ranks)
    place.console.say(f"micro_batch=auto: {found} of the {sequences} sequences of a rank fit at once")
    return found


def build_batches(config: Config, place: Place, text: Text) -> Batches:
    assert config.sequence_length is not None and config.batch_sequences is not None
    assert isinstance(config.micro_batch, int)
    tokens, data = text.prepared.train, config.data
    order = Order(len(tokens), config.sequence_length, config.seed, data.shuffle, data.shuffle_block)
    data_rank, ranks = data_coordinate(place.mesh, config.parallel.cp)
    return Batches(
        tokens,
        order,
        config.batch_sequences,
        config.micro_batch,
        data_rank,
        ranks,
        place.device,
        data.prefetch,
        text.apart,
        marked=config.model.moe.experts > 0,
    )


def build_writers(config: Config, place: Place, saved_config: dict[str, Any]) -> Writers:
    """Rank 0's; the other ranks' are empty."""
    if place.rank != 0:
        return Writers([])
    assert config.name is not None and config.steps is not None
    return writers.build(config.metrics, place.folder.path, place.console, config.name, config.steps, saved_config)


def describe_run(config: Config, chosen: Chosen, place: Place, tokenizer: Tokenizer, data: str) -> dict[str, Any]:
    """What each checkpoint says of the run. Values from the environment stand as their text, so that no secret is
    saved, and are known again by their digests."""
    machine = environment()
    return {
        "config": leaves(config) | chosen.unresolved,
        "from_environment": digests(config, chosen.unresolved),
        "data": data,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "versions": {"espalier": machine["espalier"], "python": machine["python"], **machine["packages"]},
        "ranks": place.world.ranks,
    }


def speed_of(config: Config, place: Place, dtype: Dtype, step_tokens: int) -> Speed:
    assert config.sequence_length is not None
    peak: float | None = None
    if config.hardware.peak_tflops is not None:
        peak = config.hardware.peak_tflops * 1e12
    elif place.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(place.device), dtype.name)
    return Speed(step_tokens, place.world.ranks, flops_per_token(config.model, config.sequence_length), peak)


def device_of(config: Config, place: Place, dtype: Dtype) -> Device:
    """What advice asks of the device: what the config says of it, else what the device says of itself."""
    if place.device.type != "cuda":
        return Device(dtype, config.hardware.memory_bytes, None)
    memory = config.hardware.memory_bytes or torch.cuda.get_device_properties(place.device).total_memory
    return Device(dtype, memory, speed_of(config, place, dtype, 1).peak_flops)


def least_memory(config: Config, place: Place, dtype: Dtype) -> float | None:
    """Bytes of the smallest device of the run, the same on every rank; None where one is not known. A collective."""
    of_ranks = place.ranks.gather(device_of(config, place, dtype).memory_bytes)
    known = [memory for memory in of_ranks if memory is not None]
    return min(known) if len(known) == len(of_ranks) else None


def introduce(config: Config, place: Place, text: Text, dtype: Dtype, spread: Spread, step: Step, suite: Suite) -> None:
    """What is about to be done, in a few lines."""
    say, prepared, on_gpu = place.console.say, text.prepared, place.device.type == "cuda"
    name = torch.cuda.get_device_name(place.device) if on_gpu else "CPU"
    degrees = {axis: getattr(config.parallel, axis) for axis in DEGREES}
    layout = ", ".join([config.parallel.strategy.name, *(f"{axis} {n}" for axis, n in degrees.items() if n > 1)])
    compiled = spread.compiled.name
    say(f"run {place.folder.path}: {parameters(config.model):,} parameters, {dtype.name}, compile {compiled}")
    for line in counts_told(config).splitlines():
        say(f"  {line}")
    assert config.sequence_length is not None
    say(f"  activations: {told(config.activations, config.model, config.sequence_length)}")
    kernel, why = attention_of(config, place.device, dtype)
    say(f"  attention: {kernel.name} ({why})")
    say(f"  on {place.world.ranks} x {name}: {layout}; micro_batch {config.micro_batch}")
    for line in (stages_table(config, dtype) + bubble_told(config, place.world, place.device.type)).splitlines():
        say(f"  {line}")
    for line in axes_table(config, dtype).splitlines():
        say(f"  {line}")
    if left_out := unplanned(config):
        say(f"  {left_out}")
    for better in advice(config, place.world, device_of(config, place, dtype)):
        say(f"  advice: {better}")
    tokens, heldout = len(prepared.train), len(prepared.heldout)
    say(f"  data {config.data.kind.name}: {tokens:,} tokens to train on, {heldout:,} held out")
    if (factor := config.model.moe.capacity_factor) is not None:
        dropped = "tokens above an expert's share of their document are dropped"
        say(f"  model.moe.capacity_factor={factor:g}: approximate: {dropped}")
    if approximate := config.optimizer.sums.told():
        say(f"  optimizer.compression={config.optimizer.compression.name}: approximate: {approximate}")
    of_stages = " of rank 0's stages" if config.parallel.pp > 1 else ""
    for group in step.optimizer.groups:
        say(f"  {config.optimizer.kind.name}{of_stages}: {group}")
    for note in suite.notes:
        say(f"  evals: {note}")
    if on_gpu and speed_of(config, place, dtype, 1).peak_flops is None:
        say(f"  {no_peak(name, dtype.name)}")
    skipped = prepared.manifest.get("skipped")
    if skipped:
        say("  data skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()))
