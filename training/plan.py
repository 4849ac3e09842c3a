"""What a config costs, by the formulas of parallel.planning. No torch here."""

from dataclasses import replace

from parallel.config import Dtype, ParallelConfig, Strategy
from parallel.planning.memory import Memory, memory
from parallel.planning.traffic import Batch, Traffic, traffic
from training.config import Config, OptimizerKind
from training.metrics.console import table
from training.resolve import data_ranks


def batch_of(config: Config) -> Batch | None:
    """Of a rank and step; None while it is not known."""
    sequences, micro, length = config.batch_sequences, config.micro_batch, config.sequence_length
    if sequences is None or not isinstance(micro, int) or length is None:
        return None
    return Batch(micro, sequences // (micro * data_ranks(config)), length)


def traffic_of(config: Config, dtype: Dtype) -> list[Traffic]:
    """A step's collectives; none while vocabulary or batch are not known. dtype: of the computation, settled."""
    batch = batch_of(config)
    if batch is None or config.model.vocab_size is None:
        return []
    return traffic(config.model, config.parallel, dtype, config.precision.reduce_dtype, batch, config.activations)


def memory_of(config: Config, dtype: Dtype, parallel: ParallelConfig | None = None) -> Memory | None:
    """A rank's memory, or what it would be with another layout; None while vocabulary or batch are not known."""
    batch = batch_of(config)
    if batch is None or config.model.vocab_size is None:
        return None
    moments = 2 if config.optimizer.kind is OptimizerKind.adamw else int(config.optimizer.beta1 > 0)
    reduce = config.precision.reduce_dtype
    return memory(config.model, parallel or config.parallel, dtype, reduce, batch, config.activations, moments)


def whole_replica(config: Config) -> ParallelConfig:
    """The layout in which each rank has a copy of everything."""
    ranks = data_ranks(config) * config.parallel.tp
    return replace(config.parallel, strategy=Strategy.ddp, dp_replicate=ranks, dp_shard=1, tp=1)


def axes_table(config: Config, dtype: Dtype) -> str:
    """What each axis of more than one rank does, in which parts, and what a rank sends over it in a step; "" where
    nothing is sent. What is only a number (a norm, a count) is left out."""
    rows = [
        [
            entry.axis,
            str(getattr(config.parallel, entry.axis)),
            f"{entry.what}, {entry.collective.value}",
            entry.parts,
            f"{entry.sent_bytes / 1e6:,.2f}",
        ]
        for entry in traffic_of(config, dtype)
        if not entry.only_numbers
    ]
    return table([["axis", "ranks", "what it does", "parts", "MB a step"]], rows, texts=4) if rows else ""
