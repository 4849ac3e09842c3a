"""The layouts that must all give the same run, as one would ask for them on the command line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """ranks_per_host: what a launcher would say; presets of two degrees read it."""

    ranks: int
    overrides: str
    ranks_per_host: int

    def __str__(self) -> str:
        return f"{self.ranks} x {self.overrides.replace('parallel.', '')}"


def layout(ranks: int, overrides: str, ranks_per_host: int | None = None) -> Layout:
    return Layout(ranks, overrides, ranks if ranks_per_host is None else ranks_per_host)


# Each strategy of the interface, with each choice of resharding that the number of ranks allows.
MAIN = [
    layout(1, "parallel=single"),
    layout(1, "parallel=ddp"),
    layout(1, "parallel=zero1"),
    layout(1, "parallel=fsdp2"),
    layout(1, "parallel=hsdp"),
    *[
        layout(ranks, overrides)
        for ranks in (2, 4)
        for overrides in (
            "parallel=ddp",
            "parallel=zero1",
            "parallel=fsdp2",
            "parallel=fsdp2 parallel.reshard_after_forward=false",
            "parallel=fsdp2 parallel.reshard_after_forward=2",
        )
    ],
    layout(2, "parallel=hsdp", 1),
    layout(4, "parallel=hsdp", 2),
]

# The other keys of each strategy.
OPTIONS = [
    layout(2, "parallel=ddp parallel.gradient_as_bucket_view=false parallel.bucket_cap_mb=0.01"),
    layout(2, "parallel=fsdp2 parallel.reduce=step"),
    layout(2, "parallel=fsdp2 parallel.reshard_after_forward=false parallel.reduce=micro_batch"),
    layout(2, "parallel=fsdp2 parallel.reshard_after_backward=false"),
    layout(2, "parallel=fsdp2 parallel.prefetch_forward=0 parallel.prefetch_backward=0"),
    layout(2, "parallel=fsdp2 parallel.prefetch_forward=2 parallel.prefetch_backward=2"),
    layout(2, "parallel=fsdp2 parallel.cpu_offload=true"),
    layout(4, "parallel=hsdp parallel.reduce=step", 2),
    layout(4, "parallel=hsdp parallel.reshard_after_forward=false", 2),
    layout(4, "parallel=fsdp2 parallel.dp_replicate=4 parallel.dp_shard=1"),
]

# Legal with one micro-batch a step only.
STATIC_GRAPH = layout(2, "parallel=ddp parallel.static_graph=true")

# What is computed again in backward, or fetched back.
ACTIVATIONS = [
    *[
        layout(1, f"parallel=single activations={mode}")
        for mode in ("full", "selective", "segments", "every_n", "offload")
    ],
    *[layout(2, f"parallel=fsdp2 activations={mode}") for mode in ("full", "selective", "segments", "offload")],
    layout(2, "parallel=zero1 activations=segments"),
    layout(2, "parallel=ddp activations=full"),
]
TENSOR_ACTIVATIONS = [
    *[layout(2, f"parallel=tp activations={mode}") for mode in ("full", "selective", "segments", "offload")],
    *[layout(4, f"parallel=fsdp2 parallel.tp=2 activations={mode}") for mode in ("full", "segments", "offload")],
]

# Compiled graphs.
COMPILED = [
    layout(1, "parallel=single compile=model"),
    layout(2, "parallel=ddp compile=block"),
    layout(2, "parallel=ddp compile=model"),
    layout(2, "parallel=fsdp2 compile=block"),
    layout(2, "parallel=fsdp2 compile=model"),
    layout(1, "parallel=single compile=block activations=budget activations.budget=0.3"),
    layout(1, "parallel=single compile=block activations=offload"),
    layout(1, "parallel=single compile=model activations=segments"),
    layout(1, "parallel=single compile=model activations=selective"),
    layout(2, "parallel=fsdp2 compile=block activations=full"),
    layout(2, "parallel=fsdp2 compile=block activations=selective"),
    layout(2, "parallel=fsdp2 compile=block activations=segments"),
]

COMPILED_TENSOR = [
    layout(2, "parallel=tp compile=block"),
    layout(2, "parallel=tp compile=model"),
    layout(4, "parallel=fsdp2 parallel.tp=2 compile=block"),
]

COMPILED_CONTEXT = [
    layout(2, "parallel.cp=2 compile=block"),
    layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ring compile=block activations=full"),
    layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses compile=block"),
]

# Inductor takes a quarter of a minute for a block on a CPU. These have its kernels, the others run their graphs as they
# are.
BY_INDUCTOR = {
    "parallel=single compile=model",
    "parallel=single compile=block activations=budget activations.budget=0.3",
    "parallel=ddp compile=block",
    "parallel=fsdp2 compile=block",
    "parallel=tp compile=block",
    "parallel=fsdp2 parallel.tp=2 compile=block",
    "parallel=pp compile=block",
    "parallel=fsdp2 parallel.ep=2 compile=block",
}

# Tensor parallelism alone and with every way of data parallelism.
TENSOR = [
    layout(2, "parallel=tp"),
    layout(4, "parallel=tp"),
    *[
        layout(4, f"{overrides} parallel.tp=2")
        for overrides in (
            "parallel=ddp",
            "parallel=zero1",
            "parallel=fsdp2",
            "parallel=fsdp2 parallel.reshard_after_forward=false",
        )
    ],
    layout(8, "parallel=hsdp parallel.tp=2", 4),
]

# Ranks that share sequences, in each way, alone and with every other axis.
CONTEXT = [
    *[
        layout(ranks, f"parallel.cp={ranks} parallel.context={kind}")
        for ranks in (2, 4)
        for kind in ("gather", "ring", "ulysses")
    ],
    layout(4, "parallel=ddp parallel.cp=2"),
    layout(4, "parallel=fsdp2 parallel.cp=2 parallel.context=ring"),
    layout(4, "parallel=fsdp2 parallel.cp=4 parallel.reshard_after_forward=2"),
    layout(4, "parallel=zero1 parallel.cp=2 parallel.context=ulysses"),
    layout(4, "parallel=tp parallel.tp=2 parallel.cp=2"),
    layout(4, "parallel=tp parallel.tp=2 parallel.cp=2 parallel.context=ulysses"),
    layout(8, "parallel=hsdp parallel.cp=2 parallel.context=ring", 4),
    layout(8, "parallel=fsdp2 parallel.tp=2 parallel.cp=2 parallel.context=ring"),
]
CONTEXT_ACTIVATIONS = [
    layout(2, "parallel=fsdp2 parallel.cp=2 activations=full"),
    layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ring activations=selective"),
    layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses activations=segments"),
    layout(2, "parallel.cp=2 parallel.context=ring activations=offload"),
]

# Of models with more in the stream than x.
STREAMED = [
    layout(1, "parallel=single"),
    layout(2, "parallel=ddp"),
    layout(2, "parallel=fsdp2"),
    layout(4, "parallel=fsdp2 parallel.reshard_after_forward=2"),
]
STREAMED_TENSOR = [layout(2, "parallel=tp"), layout(4, "parallel=fsdp2 parallel.tp=2")]

# Experts on ranks that are borrowed from every other axis.
EXPERT_PARALLEL = [
    layout(2, "parallel=fsdp2 parallel.ep=2"),
    layout(4, "parallel=fsdp2 parallel.ep=2"),
    layout(4, "parallel=fsdp2 parallel.ep=4 parallel.reshard_after_forward=false"),
    layout(4, "parallel=zero1 parallel.ep=2"),
    layout(4, "parallel=hsdp parallel.ep=2", 2),
    layout(2, "parallel=tp parallel.ep=2"),
    layout(2, "parallel=tp"),
    layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4"),
    layout(4, "parallel=ddp parallel.tp=2 parallel.ep=2"),
    layout(2, "parallel.cp=2 parallel.ep=2"),
    layout(4, "parallel=fsdp2 parallel.cp=2 parallel.ep=2 parallel.context=ring activations=full"),
    layout(4, "parallel=tp parallel.tp=2 parallel.cp=2 parallel.ep=4"),
    layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=2 activations=segments"),
    layout(8, "parallel=hsdp parallel.tp=2 parallel.ep=4", 4),
    layout(8, "parallel=fsdp2 parallel.tp=2 parallel.cp=2 parallel.ep=2"),
    layout(2, "parallel=fsdp2 parallel.ep=2 activations=selective"),
    layout(2, "parallel=tp activations=selective"),
    layout(2, "parallel=fsdp2 parallel.ep=2 parallel.cpu_offload=true"),
    layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4 activations=selective parallel.cpu_offload=true"),
]
# Their blocks in pieces.
COMPILED_EXPERT_PARALLEL = [
    layout(2, "parallel=fsdp2 parallel.ep=2 compile=block"),
    layout(2, "parallel=tp compile=block"),
    layout(2, "parallel=tp parallel.ep=2 compile=block activations=selective"),
    layout(2, "parallel.cp=2 parallel.ep=2 compile=block"),
    layout(2, "parallel=fsdp2 parallel.ep=2 compile=block activations=full"),
    layout(2, "parallel=fsdp2 parallel.ep=2 compile=block activations=segments"),
    layout(2, "parallel=fsdp2 parallel.ep=2 compile=block activations=budget activations.budget=0.3"),
]
# The number is that of micro-batches a step.
EXPERT_PARALLEL_PIPELINE = [
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.ep=2"), 3),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.ep=2 compile=block activations=selective"), 3),
    (layout(8, "parallel=zero1 parallel.pp=2 parallel.tp=2 parallel.ep=4 parallel.schedule=zbv"), 6),
    (layout(8, "parallel=fsdp2 parallel.pp=2 parallel.cp=2 parallel.ep=4 parallel.schedule=interleaved_1f1b"), 2),
    (layout(4, "parallel=zero1 parallel.pp=2 parallel.ep=2 parallel.schedule=dualpipev"), 6),
    (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 parallel.ep=2 parallel.schedule=dualpipev"), 6),
    (
        layout(
            8,
            "parallel=fsdp2 parallel.pp=2 parallel.cp=2 parallel.ep=4 parallel.schedule=dualpipev "
            "parallel.reshard_after_forward=false",
        ),
        6,
    ),
]

# Of models with experts.
EXPERTS = [
    layout(1, "parallel=single"),
    layout(2, "parallel=ddp"),
    layout(2, "parallel=fsdp2"),
    layout(4, "parallel=hsdp", 2),
]
MORE_EXPERTS = [
    layout(2, "parallel=zero1"),
    layout(4, "parallel=fsdp2"),
    layout(4, "parallel=ddp"),
    layout(1, "parallel=single activations=full"),
    layout(2, "parallel=fsdp2 activations=full"),
    layout(2, "parallel=fsdp2 activations=selective"),
    layout(2, "parallel=fsdp2 parallel.cpu_offload=true"),
    layout(2, "parallel=ddp activations=segments"),
    layout(2, "parallel=zero1 activations=offload"),
    layout(2, "parallel=fsdp2 compile=block"),
    layout(2, "parallel=ddp compile=model"),
    layout(2, "parallel=fsdp2 compile=block activations=selective"),
]
EXPERTS_PIPELINE = [
    (layout(2, "parallel=pp"), 3),
    (layout(2, "parallel=pp parallel.schedule=zbv"), 3),
    (layout(2, "parallel=pp activations=full"), 3),
    (layout(4, "parallel=fsdp2 parallel.pp=2"), 3),
    (layout(4, "parallel=ddp parallel.pp=2"), 3),
    (layout(4, "parallel=zero1 parallel.pp=2 parallel.schedule=zbv"), 6),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=dualpipev parallel.reshard_after_forward=false"), 6),
]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")

# Every schedule alone, and pipelines with every other axis; the number is that of micro-batches a step.
PIPELINE = [
    *[(layout(2, f"parallel=pp parallel.schedule={name}"), 6) for name in SCHEDULES],
    *[(layout(4, f"parallel=pp parallel.schedule={name}"), 12) for name in SCHEDULES],
    (layout(2, "parallel=pp parallel.stage_layers=[2,7]"), 2),
    (layout(2, "parallel=pp parallel.schedule=interleaved_1f1b parallel.stages_per_rank=3"), 4),
    (layout(4, "parallel=ddp parallel.pp=2"), 3),
    (layout(4, "parallel=zero1 parallel.pp=2 parallel.schedule=zbv"), 6),
    (layout(4, "parallel=fsdp2 parallel.pp=2"), 3),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=gpipe"), 2),
    (layout(4, "parallel=pp parallel.tp=2 parallel.pp=2 parallel.schedule=interleaved_1f1b"), 6),
    (layout(8, "parallel=3d"), 3),
    (layout(4, "parallel=pp parallel.pp=2 parallel.cp=2"), 3),
    (layout(8, "parallel=fsdp2 parallel.pp=2 parallel.cp=2 parallel.context=ring"), 3),
    (layout(8, "parallel=pp parallel.pp=2 parallel.cp=2 parallel.tp=2 parallel.context=ulysses"), 3),
    (layout(8, "parallel=hsdp parallel.pp=2", 4), 3),
]

# Each schedule with shards and with cut layers, and pipelines with what is kept, computed again or compiled; the number
# is that of micro-batches a step.
PIPELINE_MODES = [
    *[
        (layout(4, f"parallel={spread} parallel.schedule={name}"), 6)
        for spread in ("zero1 parallel.pp=2", "pp parallel.pp=2 parallel.tp=2")
        for name in SCHEDULES
    ],
    *[
        (layout(2, f"parallel=pp activations={mode}"), 3)
        for mode in ("full", "selective", "segments", "every_n", "offload")
    ],
    (layout(2, "parallel=pp parallel.schedule=looped_bfs activations=full"), 3),
    (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.cpu_offload=true"), 3),
    (layout(2, "parallel=pp compile=block"), 3),
    (layout(2, "parallel=pp compile=model"), 3),
    (layout(2, "parallel=pp parallel.schedule=interleaved_1f1b compile=block activations=full"), 4),
    (layout(4, "parallel=fsdp2 parallel.pp=2 compile=block activations=selective"), 3),
]

# What every family is tried on, with the number of micro-batches a step; how ranks share its sequences, and more.
OF_EACH_FAMILY = [
    (layout(2, "parallel=tp"), 1),
    (layout(2, "parallel=pp"), 3),
    (layout(4, "parallel=fsdp2 parallel.tp=2"), 3),
]
OF_A_FAMILY = {
    "llama": [(layout(2, "parallel.cp=2 parallel.context=ring"), 3)],
    "qwen2": [(layout(2, "parallel.cp=2 parallel.context=gather"), 1)],
    "qwen3": [(layout(2, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses"), 3)],
    "olmo": [
        (layout(2, "parallel.cp=2 parallel.context=ring"), 1),
        (layout(2, "parallel.cp=2 parallel.context=ulysses"), 3),
        (layout(2, "parallel=tp activations=full"), 3),
        (layout(2, "parallel=tp activations=segments"), 3),
        (layout(4, "parallel=pp parallel.pp=2 parallel.tp=2 parallel.schedule=zbv"), 3),
        (layout(2, "parallel=tp parallel.tp=2 compile=block"), 3),
    ],
    "gemma": [
        (layout(2, "parallel.cp=2 parallel.context=gather"), 3),
        (layout(2, "parallel.cp=2 parallel.context=ulysses"), 1),
        (layout(2, "parallel=fsdp2 parallel.cp=2 activations=selective"), 3),
        (layout(2, "parallel=tp parallel.tp=2 compile=block"), 3),
    ],
    "qwen3 moe": [
        (layout(2, "parallel=fsdp2 parallel.ep=2"), 3),
        (layout(2, "parallel.cp=2 parallel.context=ring"), 3),
        (layout(4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4"), 3),
        (layout(4, "parallel=fsdp2 parallel.pp=2 parallel.ep=2"), 3),
    ],
    "speedrun": [
        (layout(2, "parallel.cp=2 parallel.context=ulysses"), 3),
        (layout(2, "parallel=fsdp2 activations=full"), 3),
        (layout(4, "parallel=pp parallel.pp=2 parallel.cp=2 parallel.context=ring"), 3),
    ],
}
