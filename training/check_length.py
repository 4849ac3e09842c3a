"""Whether a run's length, batch and schedule go together. No torch here."""

import math
from collections.abc import Iterator

from parallel.planning.stages import runs
from training.check_layout import batches_around, sizes_near
from training.config import Config, ScheduleKind, leaves
from training.nearby import alternatives, around, counted, legal_numbers
from training.refusal import Problem
from training.resolve import DEGREES, World, data_ranks, rank_sequences
from training.schedule import Schedule


def length_rules(config: Config, world: World) -> Iterator[Problem]:
    for rule in (_length, _batch, _schedule):
        yield from rule(config, world)


def _length(config: Config, world: World) -> Iterator[Problem]:
    given = {name: getattr(config, name) for name in ("steps", "tokens", "epochs") if getattr(config, name) is not None}
    if not given:
        yield Problem("steps", None, "the run has no length", "steps=1000, or tokens=... or epochs=...")
    if len(given) > 1:
        first, *others = given
        listed = " and ".join(f"{name}={value}" for name, value in given.items())
        nulls = " ".join(f"{name}=null" for name in others)
        yield Problem(
            first,
            given[first],
            f"the length is given more than once: {listed}",
            f"one of them, such as {first}={given[first]} {nulls}",
        )


def _batch(config: Config, world: World) -> Iterator[Problem]:
    batch, tokens, length, ranks = (
        config.batch_sequences,
        config.batch_tokens,
        config.sequence_length,
        data_ranks(config),
    )
    if batch is not None and tokens is not None:
        reason = f"the batch is given twice: batch_sequences={batch} and batch_tokens={tokens}"
        yield Problem(
            "batch_sequences", batch, reason, f"one of them, such as batch_sequences={batch} batch_tokens=null"
        )
    elif batch is None and tokens is None:
        yield Problem("batch_sequences", None, "the batch has no size", "batch_sequences=32, or batch_tokens=...")
    elif batch is None and tokens is not None and length is not None and legal_numbers(tokens, length):
        legal = alternatives("batch_tokens", around(tokens, length))
        yield Problem("batch_tokens", tokens, f"is not a multiple of sequence_length={length}", legal)
    micro = config.micro_batch
    if (isinstance(micro, str) and micro != "auto") or (isinstance(micro, int) and micro < 1):
        auto = "" if config.parallel.pp > 1 else " or micro_batch=auto"
        reason = "is a number of sequences of at least 1" + ("" if config.parallel.pp > 1 else ", or auto")
        yield Problem("micro_batch", micro, reason, f"micro_batch=1{auto}")
        return
    if batch is None or batch < 1 or math.prod(getattr(config.parallel, name) for name in DEGREES) != world.ranks:
        return  # what is wrong with the degrees is told by itself
    sequences = rank_sequences(batch, ranks)
    if batch < ranks:
        reason = f"leaves nothing for {counted(ranks - batch, 'rank')} of {ranks} that see different sequences"
        instead = alternatives("batch_sequences", batches_around(batch, ranks, config.parallel))
        yield Problem("batch_sequences", batch, reason, instead)
    elif isinstance(micro, int) and micro > sequences and (config.parallel.pp == 1 or runs(config.parallel, 1)):
        reason = f"is more than the {counted(sequences, 'sequence')} of a rank in a step"
        instead = alternatives("micro_batch", sizes_near(sequences, micro, config.parallel))
        yield Problem("micro_batch", micro, reason, instead)


def unit_rules(config: Config, world: World) -> Iterator[Problem]:
    """One unit for each of warm-up and decay, and none that the schedule does not use."""
    for what in ("warmup", "decay"):
        names = [f"schedule.{what}_{unit}" for unit in ("steps", "tokens", "share")]
        given = {name: value for name, value in leaves(config).items() if name in names and value is not None}
        if len(given) > 1:
            listed = " and ".join(f"{name}={value}" for name, value in given.items())
            first = next(iter(given))
            yield Problem(first, given[first], f"is given more than once: {listed}", f"only {first}={given[first]}")
        if what == "decay" and config.schedule.kind is not ScheduleKind.warmup_stable_decay:
            for name, value in given.items():
                reason = f"is a key of warmup_stable_decay; the schedule is {config.schedule.kind.name}"
                yield Problem(name, value, reason, "schedule=warmup_stable_decay, or leave it out")


def _schedule(config: Config, world: World) -> Iterator[Problem]:
    steps, batch, length = config.steps, config.batch_sequences, config.sequence_length
    if steps is None or batch is None or length is None or not legal_numbers(steps, batch, length):
        return
    schedule = Schedule(config.schedule, config.optimizer.lr, steps, batch * length)
    decay = schedule.decay if config.schedule.kind is ScheduleKind.warmup_stable_decay else 0
    if schedule.warmup + decay > steps:
        taken = f"{schedule.warmup} steps of warm-up" + (f" and {decay} of decay" if decay else "")
        name = next(n for n in ("steps", "tokens", "share") if getattr(config.schedule, f"warmup_{n}") is not None)
        value = getattr(config.schedule, f"warmup_{name}")
        reason = f"{taken} do not fit into a run of {steps}"
        yield Problem(
            f"schedule.warmup_{name}",
            value,
            reason,
            f"schedule.warmup_{name}=null for a share of the run, or more steps",
        )
