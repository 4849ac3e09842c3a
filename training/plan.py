"""What a config costs, by the formulas of parallel.planning. No torch here."""

import math
from collections import Counter
from dataclasses import replace

from models.shapes import parameter_shapes
from parallel.config import Dtype, ParallelConfig, Strategy
from parallel.planning.layout import master_bytes
from parallel.planning.memory import Memory, memory
from parallel.planning.stages import costs, stage_with, stages
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
    """A step's collectives; none while vocabulary or batch are not known, or with a pipeline, whose stages the formulas
    do not know yet. dtype: of the computation, settled."""
    batch = batch_of(config)
    if batch is None or config.model.vocab_size is None or config.parallel.pp > 1:
        return []
    return traffic(config.model, config.parallel, dtype, config.precision.reduce_dtype, batch, config.activations)


def memory_of(config: Config, dtype: Dtype, parallel: ParallelConfig | None = None) -> Memory | None:
    """A rank's memory, or what it would be with another layout; None while vocabulary or batch are not known, or with a
    pipeline, whose stages the formulas do not know yet."""
    batch = batch_of(config)
    if batch is None or config.model.vocab_size is None or config.parallel.pp > 1:
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


def stages_table(config: Config, dtype: Dtype) -> str:
    """What each stage of a pipeline has: layers, parameters, its share of the FLOPs, and the bytes of parameters,
    gradients and optimizer state on one of its ranks; "" without a pipeline."""
    model, parallel = config.model, config.parallel
    if parallel.pp == 1 or model.vocab_size is None:
        return ""
    cut = stages(model, parallel)
    flops = costs(model, cut)
    shapes = parameter_shapes(model)
    shapes |= {second: shapes[first] for second, first in model.shared_parameters.items()}
    held = Counter[int]()
    for name, shape in shapes.items():
        held[stage_with(name, cut).index] += math.prod(shape)
    moments = 2 if config.optimizer.kind is OptimizerKind.adamw else int(config.optimizer.beta1 > 0)
    rows = []
    for stage in cut:
        state = held[stage.index] * master_bytes(dtype) * (2 + moments) / (parallel.tp * parallel.dp_shard)
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}" if len(stage.layers) > 1 else str(stage.layers.start)
        ends = ["embedding"] * stage.first + ["head"] * stage.last
        share = flops[stage.index] / sum(flops.values())
        holds = ", ".join([f"layers {layers}", *ends])
        rows.append(
            [str(stage.index), str(stage.rank), holds, f"{held[stage.index]:,}", f"{share:.1%}", f"{state / 2**30:.2f}"]
        )
    return table([["stage", "pp rank", "holds", "parameters", "FLOPs", "state GiB a rank"]], rows, texts=3)
