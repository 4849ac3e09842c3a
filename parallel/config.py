"""How a model is spread and computed. No torch here."""

import math
from dataclasses import dataclass
from enum import Enum

from models.config import ModelConfig
from models.schema import Changes, key


class Strategy(Enum):
    """auto: fsdp2 where dp_shard is not 1, else ddp where dp_replicate is not 1, else single."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp2 = "fsdp2"


class Reduce(Enum):
    """When gradients are summed over ranks."""

    auto = "auto"
    step = "step"
    micro_batch = "micro_batch"


Schedule = Enum(
    "Schedule",
    [
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("looped_bfs", "LoopedBFS"),
        ("interleaved_zero_bubble", "InterleavedZeroBubble"),
        ("zbv", "ZBVZeroBubble"),
        ("dualpipev", "DualPipeV"),
    ],
)
"""In which order the ranks of a pipeline take the passes of the micro-batches; the values are torch's names."""


class Context(Enum):
    """How ranks that share a sequence attend to each other's tokens."""

    gather = "gather"
    ring = "ring"
    ulysses = "ulysses"


@dataclass
class ParallelConfig:
    """Degrees of the mesh and the keys of each strategy. No key here changes the mathematics."""

    strategy: Strategy = key(
        Strategy.single,
        "single | ddp | fsdp2 (zero1, hsdp and fsdp2 are presets of fsdp2) | auto: as the degrees need it",
        Changes.layout,
    )
    pp: int = key(1, "pipeline stages", Changes.layout)
    dp_replicate: int = key(1, "copies of the model (or of its shards); -1: the rest of the ranks", Changes.layout)
    dp_shard: int = key(1, "ranks that share one copy of the model's state; -1: the rest of the ranks", Changes.layout)
    cp: int = key(1, "ranks that share each sequence; -1: the rest", Changes.layout)
    tp: int = key(1, "ranks that share each layer and cut the sequence between layers; -1: the rest", Changes.layout)
    ep: int = key(
        1, "ranks that share a layer's experts, borrowed from the other axes; -1: the most that can", Changes.layout
    )
    reduce: Reduce = key(
        Reduce.auto,
        "gradients are summed over ranks once a step | every micro_batch; auto: once where parameters stay whole in the step (ddp: always)",
        Changes.layout,
    )
    timeout_seconds: float = key(
        600.0,
        "ranks that wait for another for longer end the run; the first step may take three times as long",
        Changes.layout,
    )
    allow_mixed_devices: bool = key(
        False,
        "ranks may have devices of different models or memory; the slowest sets the pace",
        Changes.layout,
    )
    async_tp: bool = key(
        False,
        "tp: overlap its communication with matrix products (symmetric memory; needs a GPU and compile)",
        Changes.layout,
    )
    # pp
    schedule: Schedule = key(
        Schedule["1f1b"],
        "pp: gpipe | 1f1b | interleaved_1f1b | looped_bfs | interleaved_zero_bubble | zbv | dualpipev",
        Changes.layout,
    )
    stages_per_rank: int | None = key(
        None, "pp: stages a rank has in an interleaved or looped schedule; null: 2", Changes.layout
    )
    stage_layers: list[int] | None = key(
        None,
        "pp: layers of each stage, such as [4,4,4,3]; null: cut by cost, so that no rank has more than it must, the head counted (the embedding costs next to nothing)",
        Changes.layout,
    )
    # cp
    context: Context = key(
        Context.gather,
        "cp: gather (keys and values of the whole sequence on each rank) | ring (they go round, one share at a time) | ulysses (each rank has the whole sequence for a part of the heads)",
        Changes.layout,
    )
    # ddp
    bucket_cap_mb: float = key(25.0, "ddp: size of the buckets in which gradients are summed, in MB", Changes.layout)
    gradient_as_bucket_view: bool = key(
        True, "ddp: gradients live in the buckets, which saves one copy of them", Changes.layout
    )
    static_graph: bool = key(False, "ddp: the same parameters are used in each step", Changes.layout)
    # fsdp2
    reshard_after_forward: bool | int = key(
        True,
        "fsdp2: true gathers parameters again in backward (ZeRO-3), false keeps them (ZeRO-2), a number reshards to that many ranks",
        Changes.layout,
    )
    reshard_after_backward: bool = key(
        True,
        "fsdp2: false keeps parameters whole between the micro-batches of a step (ZeRO-1, with reduce: step)",
        Changes.layout,
    )
    prefetch_forward: int = key(1, "fsdp2: blocks gathered ahead in forward", Changes.layout)
    prefetch_backward: int = key(1, "fsdp2: blocks gathered ahead in backward", Changes.layout)
    cpu_offload: bool = key(
        False, "fsdp2: parameters, gradients and optimizer state wait in CPU memory", Changes.layout
    )

    @property
    def on_mesh(self) -> bool:
        """Whether there is a mesh: a single device has none."""
        degrees = (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        return self.strategy is not Strategy.single or any(degree != 1 for degree in degrees)

    @property
    def copies(self) -> int:
        """Ranks with a copy of the same parameters: those that share a sequence too, where no state is shared out."""
        return self.dp_replicate * (1 if self.strategy is Strategy.fsdp2 else self.cp)

    @property
    def shards(self) -> int:
        """Ranks among which the model's state is shared out: those that share a sequence too."""
        return self.dp_shard * (self.cp if self.strategy is Strategy.fsdp2 else 1)

    @property
    def expert_shards(self) -> int:
        """Ranks among which experts apart from their layer are shared out, beside those along ep
        (parallel.mesh.expert_view)."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def sequence_cuts(self) -> int:
        """Equal parts that a sequence must have: one a rank along tp, two a rank along cp."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def torch_ddp(self) -> bool:
        """Whether torch's DDP serves: where copies are the only axis. Elsewhere FSDP2 keeps whole copies."""
        return self.strategy is Strategy.ddp and self.tp == self.pp == self.ep == 1


def experts_apart(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether experts are spread over other ranks than the rest of their layer."""
    return model.moe.experts > 0 and parallel.tp * parallel.ep > 1


class Compress(Enum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"
    powersgd = "powersgd"


@dataclass(frozen=True)
class Compression:
    """How torch's DDP makes less of the gradients that it sums over ranks: the optimizer's keys, since this changes the
    mathematics."""

    kind: Compress = Compress.none
    rank: int = 1  # of PowerSGD
    start_step: int = 0  # of PowerSGD: steps before it begins

    def factors(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a gradient that PowerSGD sums as two factors, [rows, rank] and [columns, rank];
        None where they would not be smaller. All but the last dimension are rows."""
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        smaller = self.kind is Compress.powersgd and (rows + columns) * self.rank < rows * columns
        return (rows, columns, self.rank) if smaller else None

    def told(self) -> str:
        """What is not exact; "" where all is."""
        if self.kind is Compress.none:
            return ""
        if self.kind is Compress.powersgd:
            begin = f"from step {self.start_step + 1:,} on " if self.start_step > 0 else ""
            return f"{begin}gradients of matrices are summed over ranks in rank {self.rank}, the rest is added later"
        return f"each rank's gradients are rounded to {self.kind.name} before they are summed"


UNCOMPRESSED = Compression()


class Dtype(Enum):
    auto = "auto"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp64 = "fp64"


@dataclass
class PrecisionConfig:
    """The dtype of the computation. Weights and optimizer state are float32 masters (float64 with fp64)."""

    dtype: Dtype = key(
        Dtype.auto, "auto (bf16 where the device computes in it, else fp32) | fp32 | tf32 | bf16 | fp64 (for proofs)"
    )
    reduce_dtype: Dtype = key(Dtype.fp32, "dtype in which gradients are summed over ranks: fp32 | bf16")


class Scope(Enum):
    auto = "auto"
    none = "none"
    block = "block"
    model = "model"


@dataclass
class CompileConfig:
    """torch.compile."""

    scope: Scope = key(
        Scope.auto,
        "none | block (one graph for all blocks) | model | auto (block on a GPU, none on a CPU)",
        Changes.layout,
    )
    dynamic: bool = key(
        False,
        "false: a graph for each shape, and the run keeps to few | true: one graph for all shapes",
        Changes.layout,
    )


class Recompute(Enum):
    auto = "auto"
    none = "none"
    full = "full"
    selective = "selective"
    segments = "segments"
    every_n = "every_n"
    budget = "budget"
    offload = "offload"


@dataclass
class ActivationsConfig:
    """What forward keeps for backward. What it does not keep is computed again or fetched back, to the same numbers."""

    mode: Recompute = key(
        Recompute.auto,
        "auto (none below a billion parameters, else selective; less where it would not fit a device) | none (all is kept) | full | selective | segments | every_n | budget | offload: docs/activations.md",
        Changes.layout,
    )
    segments: int | None = key(
        None, "segments: parts of equally many blocks; null: the square root of the layers", Changes.layout
    )
    every_n: int = key(2, "every_n: each so-many-th block is computed again, as in full", Changes.layout)
    budget: float = key(
        0.5, "budget: share of what the compiled graph would keep, from which torch chooses", Changes.layout
    )
