"""The config of a run, one dataclass a group. No torch here: a typo is refused before it is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from models.config import ModelConfig
from models.schema import Changes, key
from parallel.config import ActivationsConfig, CompileConfig, Compress, Compression, ParallelConfig, PrecisionConfig


class TokenizerKind(Enum):
    auto = "auto"
    bytes = "bytes"
    gpt2 = "gpt2"
    tiktoken = "tiktoken"
    huggingface = "huggingface"


@dataclass
class TokenizerConfig:
    """Text to tokens."""

    kind: TokenizerKind = key(
        TokenizerKind.auto, "auto (the model's own) | bytes | gpt2 | tiktoken (with name) | huggingface (with file)"
    )
    name: str | None = key(None, "tiktoken: name of the encoding, such as cl100k_base")
    file: str | None = key(None, "huggingface: path of a tokenizer.json")
    end_of_text: str | None = key(
        None,
        "huggingface: the token that ends a document; null: the first of <|endoftext|>, <|end_of_text|>, </s>, <eos> there is",
    )


class DataKind(Enum):
    stdlib = "stdlib"
    files = "files"


class Shuffle(Enum):
    full = "full"
    two_level = "two_level"
    none = "none"


@dataclass
class DataConfig:
    """Where the text comes from and in which order it is read."""

    kind: DataKind = key(
        DataKind.stdlib, "stdlib (source and documentation of the running Python's standard library) | files"
    )
    files: list[str] = key(
        list,
        "files: paths or globs of .txt, .jsonl and .parquet files, also .gz and .zst; relative to the folder the command is given in",
    )
    field: str = key("text", "files: the field of a .jsonl or .parquet file that holds the text")
    heldout: float = key(0.05, "share of the documents (of the files, for stdlib) kept for evaluation, chosen by hash")
    mask_documents: bool = key(
        False,
        "documents that share a sequence are kept apart: no attention from one to another, positions count in each, and the first token of a document is not predicted from the one before",
    )
    shuffle: Shuffle = key(
        Shuffle.full,
        "full | two_level (blocks of samples, then within a block: for data that is slow to jump in) | none",
    )
    shuffle_block: int = key(1024, "two_level: samples in a block")
    cache: str | None = key(None, "folder of token shards; null: $ESPALIER_CACHE, else ~/.cache/espalier", Changes.io)
    workers: int | None = key(None, "processes that tokenize; null: one a core", Changes.io)
    prefetch: int = key(2, "steps whose batches are made ready ahead", Changes.io)


class OptimizerKind(Enum):
    adamw = "adamw"
    sgd = "sgd"


@dataclass
class OptimizerConfig:
    """What is done with a gradient."""

    kind: OptimizerKind = key(OptimizerKind.adamw, "adamw (Loshchilov and Hutter 2019) | sgd")
    lr: float = key(1e-3, "highest learning rate; the model presets set their own")
    weight_decay: float = key(0.1, "decay of matrices and embeddings; norms and biases have none")
    beta1: float = key(0.9, "adamw: decay of the first moment; sgd: momentum")
    beta2: float = key(0.95, "adamw: decay of the second moment")
    eps: float = key(1e-8, "adamw: added to the root of the second moment")
    clip: float | None = key(
        1.0, "largest global gradient norm, above which gradients are scaled down; null: no clipping"
    )
    max_skipped: int = key(
        10,
        "a step with a non-finite gradient is skipped; so many in a row stop the run at the next read of the metrics",
    )
    compression: Compress = key(
        Compress.none,
        "for slow links, approximate, ddp only: none | bf16 | fp16 (gradients are rounded before they are summed over ranks) | powersgd (those of matrices are summed as two narrow factors, Vogels et al. 2019)",
    )
    powersgd_rank: int = key(4, "powersgd: columns of the factors")
    powersgd_start_step: int = key(1000, "powersgd: first steps, whose gradients are summed whole")

    @property
    def sums(self) -> Compression:
        return Compression(self.compression, self.powersgd_rank, self.powersgd_start_step)


class ScheduleKind(Enum):
    warmup_cosine = "warmup_cosine"
    warmup_stable_decay = "warmup_stable_decay"
    linear = "linear"
    constant = "constant"


@dataclass
class ScheduleConfig:
    """Learning rate as a pure function of the step. Give each of warm-up and decay in one unit."""

    kind: ScheduleKind = key(ScheduleKind.warmup_cosine, "warmup_cosine | warmup_stable_decay | linear | constant")
    warmup_steps: int | None = key(None, "steps in which the rate rises linearly")
    warmup_tokens: int | None = key(None, "the same in tokens")
    warmup_share: float | None = key(None, "the same as a share of the run; 0.05 where none of the three is given")
    decay_steps: int | None = key(None, "warmup_stable_decay: last steps, in which the rate falls")
    decay_tokens: int | None = key(None, "the same in tokens")
    decay_share: float | None = key(None, "the same as a share of the run; 0.2 where none of the three is given")
    final_share: float = key(0.1, "rate of the last step as a share of the highest")


class Resume(Enum):
    auto = "auto"
    must = "must"
    never = "never"


class TestRestore(Enum):
    auto = "auto"
    always = "always"
    never = "never"


class BackgroundSaves(Enum):
    none = "none"
    thread = "thread"


class Best(Enum):
    lowest = "lowest"
    highest = "highest"


class Load(Enum):
    weights = "weights"
    all = "all"


@dataclass
class CheckpointConfig:
    """What is saved, when, and what is kept."""

    dir: str | None = key(
        None,
        "folder of the checkpoints, or a URL such as s3://bucket/prefix (extra s3); null: <out>/<name>/checkpoints",
        Changes.io,
    )
    mirror: str | None = key(
        None,
        "another folder or URL, to which the newest checkpoint and the permanent ones are copied in the background; null: none",
        Changes.io,
    )
    every: int = key(500, "steps between checkpoints; 0: only the last", Changes.io)
    background: BackgroundSaves = key(
        BackgroundSaves.none,
        "none (steps wait until a checkpoint is written) | thread (they go on as soon as the state is copied)",
        Changes.io,
    )
    keep: int = key(3, "newest checkpoints that stay; permanent and ephemeral ones are not counted", Changes.io)
    keep_best: str | None = key(
        None, "a score, such as heldout.loss: the checkpoint that has the best stays too; null: none", Changes.io
    )
    best_is: Best = key(Best.lowest, "keep_best: lowest | highest", Changes.io)
    permanent_every: int = key(
        0,
        "a checkpoint at a multiple of this is permanent: never deleted; the last one always is; 0: only the last",
        Changes.io,
    )
    permanent_steps: list[int] = key(list, "more steps to save a permanent checkpoint after", Changes.io)
    ephemeral_every: int = key(
        0,
        "steps between checkpoints that only serve a restart: not scored, and deleted once there is a newer one; 0: none",
        Changes.io,
    )
    every_minutes: float | None = key(
        None, "an ephemeral checkpoint too when so many minutes have passed since the last one of any kind", Changes.io
    )
    resume: Resume = key(
        Resume.auto,
        "auto (go on where the folder's newest complete checkpoint is, else start) | must (refuse to start anew) | never (refuse a folder that has a run)",
        Changes.io,
    )
    load: str | None = key(
        None, "start from this checkpoint, or from the newest complete one of this run's folder", Changes.math
    )
    load_parts: Load = key(
        Load.weights, "weights (fresh optimizer, step 0) | all (go on with optimizer, step and data)", Changes.math
    )
    allow_changes: list[str] = key(
        list,
        "keys that may differ on a resume though they change the mathematics, such as [steps,optimizer.lr]",
        Changes.io,
    )
    export_hf: bool = key(
        False,
        "write each permanent checkpoint for transformers too, in <out>/<name>/huggingface/step-...",
        Changes.io,
    )
    grace_seconds: float = key(
        15.0,
        "seconds that a machine gives from its notice to its end, as spot machines do: a save that takes longer is warned of, and before the end of a Slurm job the run saves at least so early",
        Changes.io,
    )
    test_restore: TestRestore = key(
        TestRestore.auto,
        "save after step 1, load it back, compare bitwise and stop if it differs: always | never | auto (runs expected to last over an hour)",
        Changes.io,
    )


@dataclass
class SpikesConfig:
    """When a run goes back to before a spike and leaves out the batches that caused it."""

    threshold: float = key(
        0.0,
        "a step is a spike where its loss or gradient norm is so many deviations above the median of the window, robustly estimated; 20 is a cautious value; 0: none is looked for",
    )
    window: int = key(100, "steps before, to which a step is compared; before there are so many, nothing is a spike")
    before: int = key(1, "batches before the spike's that are left out too")
    after: int = key(0, "batches after the spike's that are left out too")
    max_rollbacks: int = key(5, "so often the run goes back; the next spike ends it")


@dataclass
class EvalsConfig:
    """The suite that scores each scheduled checkpoint. The same items in the same order for the whole run."""

    tasks: list[str] = key(
        lambda: ["heldout", "continuation"],
        "heldout (loss, perplexity, bits per byte) | continuation (the true continuation of a held-out text among four)",
        Changes.io,
    )
    every: int = key(0, "also score every so many steps, without saving; 0: only at checkpoints", Changes.io)
    heldout_tokens: int = key(131072, "heldout: tokens scored, from the start of the held-out stream", Changes.io)
    continuation_items: int = key(64, "continuation: number of items", Changes.io)
    batch_sequences: int = key(16, "sequences a rank scores at once", Changes.layout)


@dataclass
class MetricsConfig:
    """What is shown and written while the run goes on."""

    every: int = key(
        10, "steps between reads of the metrics from the device; each step in between has its own record", Changes.io
    )
    console: bool = key(
        True, "progress and tables on the terminal; a line every so often where there is none", Changes.io
    )
    tensorboard: bool = key(True, "event files in the run's folder", Changes.io)
    wandb_project: str | None = key(None, "Weights & Biases project; null: not used. Needs the extra wandb", Changes.io)
    sample_tokens: int = key(200, "tokens of text that the finished model writes at the end; 0: none", Changes.io)
    sample_prompt: str = key("", "text the sample continues", Changes.io)


class HealthCheck(Enum):
    auto = "auto"
    always = "always"
    never = "never"


@dataclass
class HardwareConfig:
    """The machine the run is meant for."""

    device: str = key("auto", "auto | cpu | cuda", Changes.layout)
    gpus: int | None = key(
        None, "ranks of the run for check_only on another machine; null: as launched", Changes.layout
    )
    ranks_per_host: int | None = key(
        None, "ranks on each host for check_only on another machine; null: as launched, or 8", Changes.layout
    )
    peak_tflops: float | None = key(
        None, "dense peak of one device in the run's dtype, for MFU; null: from the table of known devices", Changes.io
    )
    memory_gib: float | None = key(
        None, "memory of one device in GiB, for advice; null: the device's own on CUDA, unknown on a CPU", Changes.io
    )

    health_check: HealthCheck = key(
        HealthCheck.auto,
        "before the first step each rank tries a matrix product, its memory and a sum over all ranks; one that is wrong or fails ends the run with its host's name: always | never | auto (on GPUs)",
        Changes.io,
    )
    slow_factor: float = key(
        1.5, "health check: a rank that takes so many times as long as most is warned of, with its host", Changes.io
    )

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_gib is None else self.memory_gib * 2**30


class Debug(Enum):
    none = "none"
    paranoid = "paranoid"


@dataclass
class Config:
    """A run. `steps`, `tokens` and `epochs`: give one. `batch_sequences` and `batch_tokens`: give one."""

    name: str | None = key(None, "folder of the run under out; null: the experiment's or model's preset", Changes.io)
    out: str = key("outputs", "folder of all runs", Changes.io)
    seed: int = key(0, "of initial weights, data order and dropout")
    deterministic: bool = key(False, "refuse kernels that give different bits from run to run", Changes.layout)
    debug: Debug = key(
        Debug.none,
        "none | paranoid (after each backward pass and each update, what several ranks hold is compared bit by bit; the first difference ends the run)",
        Changes.layout,
    )
    check_only: bool = key(False, "stop after the checks and print the resolved config", Changes.io)
    eval_only: bool = key(False, "score the checkpoint in checkpoint.load and stop", Changes.io)
    max_minutes: float | None = key(None, "save and stop after so many minutes, with exit code 75", Changes.io)
    steps: int | None = key(None, "length of the run in optimizer steps")
    tokens: int | None = key(None, "length of the run in tokens")
    epochs: float | None = key(None, "length of the run in passes over the data")
    sequence_length: int | None = key(None, "tokens of a training sequence; null: the model's context")
    batch_sequences: int | None = key(None, "sequences of one optimizer step over all ranks")
    batch_tokens: int | None = key(None, "tokens of one optimizer step over all ranks")
    micro_batch: int | str | None = key(
        None, "sequences a rank computes at once; auto: the most that fit; null: about 8192 tokens", Changes.layout
    )
    model: ModelConfig = key(ModelConfig, "the model")
    parallel: ParallelConfig = key(ParallelConfig, "how it is spread", Changes.layout)
    precision: PrecisionConfig = key(PrecisionConfig, "dtype of the computation")
    compile: CompileConfig = key(CompileConfig, "torch.compile", Changes.layout)
    activations: ActivationsConfig = key(ActivationsConfig, "what is kept for backward", Changes.layout)
    tokenizer: TokenizerConfig = key(TokenizerConfig, "text to tokens")
    data: DataConfig = key(DataConfig, "text, and its order")
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer")
    schedule: ScheduleConfig = key(ScheduleConfig, "the learning rate over the run")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "what is saved and kept", Changes.io)
    spikes: SpikesConfig = key(SpikesConfig, "what is done about spikes")
    evals: EvalsConfig = key(EvalsConfig, "the evaluation suite", Changes.io)
    metrics: MetricsConfig = key(MetricsConfig, "what is shown and written", Changes.io)
    hardware: HardwareConfig = key(HardwareConfig, "the machine", Changes.layout)


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config with its value, as {"optimizer.lr": 0.001, ...}; enums as their names."""
    found: dict[str, Any] = {}
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if hasattr(value, "__dataclass_fields__"):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value.name if isinstance(value, Enum) else value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves` as plain dictionaries: {"optimizer": {"lr": 0.001, ...}, ...}."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    return tree
