"""What a config costs, by the formulas of parallel.planning. No torch here."""

from collections.abc import Sequence
from dataclasses import replace

from models.config import ModelConfig
from models.flops import active_parameters, embedding_parameters, flops_per_token, parameters, seen_flops_per_token
from models.parts import TARGET, uncounted, without_bytes
from parallel.config import Dtype, ParallelConfig, Recompute, Scope, Strategy
from parallel.planning.layout import master_bytes, values
from parallel.planning.memory import Memory, held_shapes, memory, state_of
from parallel.planning.stages import as_scheduled, costs, stage_shapes, stages
from parallel.planning.traffic import Batch, Traffic, traffic
from parallel.recomputation import settled
from training.config import Config, OptimizerKind
from training.metrics.console import table
from training.resolve import data_ranks, rank_sequences

GIB = 2**30
FITS = 0.8  # of a device's memory; what estimates do not see needs the rest
LADDER = (Recompute.none, Recompute.selective, Recompute.full)  # each keeps less than the one before


def batch_of(config: Config, parallel: ParallelConfig | None = None) -> Batch | None:
    """Of a rank and step, with this layout or another; None while it is not known."""
    sequences, micro, length = config.batch_sequences, config.micro_batch, config.sequence_length
    if sequences is None or not isinstance(micro, int) or length is None:
        return None
    of = parallel or config.parallel
    ranks = of.dp_replicate * of.dp_shard
    micro = min(micro, rank_sequences(sequences, ranks))
    return Batch(micro, rank_sequences(sequences, ranks, micro) // micro, length // of.cp)


def traffic_of(config: Config, dtype: Dtype) -> tuple[int, list[Traffic]]:
    """A step's collectives of the rank along pp that sends the most, and which it is; none while vocabulary or batch
    are not known. dtype: of the computation, settled."""
    batch = batch_of(config)
    if batch is None or config.model.vocab_size is None or _has_other_traffic(config.model, config.parallel):
        return 0, []
    layout = (config.model, config.parallel, dtype, config.precision.reduce_dtype, batch, config.activations)
    sums = config.optimizer.sums
    found = [traffic(*layout, pipeline_rank=rank, compression=sums) for rank in range(config.parallel.pp)]
    most = max(range(len(found)), key=lambda rank: sum(entry.sent_bytes for entry in found[rank]))
    return most, found[most]


def memory_of(config: Config, dtype: Dtype, parallel: ParallelConfig | None = None) -> Memory | None:
    """The memory of the rank that needs the most, with this layout or another; None while vocabulary or batch are not
    known."""
    found = memory_of_ranks(config, dtype, parallel or config.parallel)
    return max(found, key=lambda of_rank: of_rank.total) if found else None


def memory_of_ranks(config: Config, dtype: Dtype, parallel: ParallelConfig) -> list[Memory]:
    """Of each rank along pp; none while vocabulary or batch are not known, and with parts of the user's that do
    not say what they keep."""
    batch = batch_of(config, parallel)
    if batch is None or config.model.vocab_size is None or without_bytes(config.model):
        return []
    moments = 2 if config.optimizer.kind is OptimizerKind.adamw else int(config.optimizer.beta1 > 0)
    layout = (config.model, parallel, dtype, config.precision.reduce_dtype, batch, config.activations, moments)
    return [memory(*layout, rank, config.optimizer.sums) for rank in range(parallel.pp)]


def settle_activations(config: Config, dtype: Dtype, memory_bytes: float | None) -> str:
    """Writes into the config what activations=auto stands for where the model's size alone does not say it: the first
    that fits a device of this memory, of what the size says and what keeps less, else the last. Returns why; "" where
    nothing is written."""
    activations, parallel = config.activations, config.parallel
    if activations.mode is not Recompute.auto:
        return ""
    by_size = settled(activations, config.model)
    mode: Recompute = as_scheduled(activations, parallel).mode
    why = f"{parallel.schedule.name} computes nothing again"
    if mode is Recompute.auto:
        mode, why = _first_that_fits(config, dtype, memory_bytes, LADDER[LADDER.index(by_size) :])
    if mode is by_size:
        return ""
    activations.mode = mode
    return f"activations=auto: {mode.name}; {why}"


def _first_that_fits(
    config: Config, dtype: Dtype, memory_bytes: float | None, modes: Sequence[Recompute]
) -> tuple[Recompute, str]:
    """The first where something is not known. With what the first and the found one would take."""
    if memory_bytes is None or _cannot_again(config):
        return modes[0], ""
    taken: list[float] = []
    for mode in modes:
        planned = memory_of(replace(config, activations=replace(config.activations, mode=mode)), dtype)
        if planned is None:
            return modes[0], ""
        taken.append(planned.total)
        if planned.total <= FITS * memory_bytes:
            break
    return mode, f"{modes[0].name} would take {gib(taken[0], memory_bytes)}, {mode.name} {gib(taken[-1], memory_bytes)}"


def _cannot_again(config: Config) -> bool:
    """Whether torch cannot compute blocks again: training.check_layout refuses what may be compiled so."""
    return config.parallel.tp > 1 and config.model.dropout > 0 and config.compile.scope is not Scope.none


def unplanned(config: Config) -> str:
    """What the plans of this config leave out; "" where nothing."""
    model, told = config.model, []
    own = [f"{name} {of[TARGET]}" for name, of in model.parts.items()]
    without = {"memory": without_bytes(model), "traffic": own if _has_other_traffic(model, config.parallel) else []}
    told += [f"{what} is not planned with {' and '.join(parts)}" for what, parts in without.items() if parts]
    if left := uncounted(model, config.sequence_length or model.context):
        told.append(f"MFU leaves out {', '.join(left)}, whose forward torch cannot count on the meta device")
    return "; ".join(told)


def _has_other_traffic(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether ranks send what no formula counts: what a user's parts do."""
    return bool(model.parts) and (parallel.tp > 1 or ("attention" in model.parts and parallel.cp > 1))


def gib(used: float, of: float) -> str:
    return f"{used / GIB:.2f} of {of / GIB:.3g} GiB"


def whole_replica(config: Config) -> ParallelConfig:
    """The layout in which each rank has a copy of everything."""
    parallel = config.parallel
    ranks = data_ranks(config) * parallel.cp * parallel.tp * parallel.pp
    return replace(parallel, strategy=Strategy.ddp, dp_replicate=ranks, dp_shard=1, cp=1, tp=1, ep=1, pp=1)


def counts_told(config: Config) -> str:
    """The model's parameters and what a token costs in training (models.flops); "" while vocabulary or length are not
    known."""
    model, length = config.model, config.sequence_length
    if model.vocab_size is None or length is None:
        return ""
    total, active = parameters(model), active_parameters(model)
    of_them = [] if active == total else [f"{active:,} active"]
    of_them.append(f"{embedding_parameters(model):,} of embeddings and head")
    whole, seen = flops_per_token(model, length), seen_flops_per_token(model, length)
    return (
        f"parameters: {total:,}, of them {', '.join(of_them)}\n"
        f"FLOPs per token: {whole / 1e6:,.1f} M with attention over the whole square, as MFU counts; "
        f"{seen / 1e6:,.1f} M over what is seen ({seen / whole:.1%})".replace("%", " %")
    )


def axes_table(config: Config, dtype: Dtype) -> str:
    """What each axis of more than one rank does, in which parts, and what a rank sends over it in a step; "" where
    nothing is sent. What is only a number (a norm, a count) is left out. With a pipeline it is the rank along pp that
    sends the most, which is said below."""
    rank, found = traffic_of(config, dtype)
    rows = [
        [
            entry.axis,
            str(entry.ranks),
            f"{entry.what}, {entry.collective.value}",
            entry.parts,
            f"{entry.sent_bytes / 1e6:,.2f}",
        ]
        for entry in found
        if not entry.only_numbers
    ]
    if not rows:
        return ""
    below = f"\nof pp rank {rank}, which sends the most" if config.parallel.pp > 1 else ""
    return table([["axis", "ranks", "what it does", "parts", "MB a step"]], rows, texts=4) + below


def stages_table(config: Config, dtype: Dtype) -> str:
    """What each stage of a pipeline has: layers, parameters, its share of the FLOPs, and the bytes of parameters,
    gradients and optimizer state on one of its ranks; below, what ranks are planned to use; "" without a pipeline."""
    model, parallel = config.model, config.parallel
    if parallel.pp == 1 or model.vocab_size is None:
        return ""
    cut = stages(model, parallel)
    flops = costs(model, cut)
    held = {stage.index: values(stage_shapes(model, parallel, stage)) for stage in cut}
    moments = 2 if config.optimizer.kind is OptimizerKind.adamw else int(config.optimizer.beta1 > 0)
    rows = []
    for stage in cut:
        of_rank = state_of(model, held_shapes(model, parallel, stage))
        state = master_bytes(dtype) * (of_rank.parameters + of_rank.gradients + moments * of_rank.learned)
        first, last = stage.layers.start, stage.layers.stop - 1
        layers = f"layers {first}-{last}" if last > first else f"layer {first}"
        ends = ["embedding"] * stage.first + ["head"] * stage.last
        share = flops[stage.index] / sum(flops.values())
        holds = ", ".join([layers, *ends])
        rows.append(
            [str(stage.index), str(stage.rank), holds, f"{held[stage.index]:,}", f"{share:.1%}", f"{state / GIB:.3g}"]
        )
    planned = [f"{found.total / GIB:.3g}" for found in memory_of_ranks(config, dtype, parallel)]
    below = f"\nplanned GiB at the peak, by pp rank: {', '.join(planned)}" if planned else ""
    return table([["stage", "pp rank", "holds", "parameters", "FLOPs", "state GiB a rank"]], rows, texts=3) + below
