"""Fills in what depends on other values, once, after composition. No torch here."""

import math
import os
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from models.config import Balance, MoE
from parallel.config import Dtype, ParallelConfig, Strategy, experts_apart
from parallel.planning.stages import runs
from training.config import Config, ScheduleKind, TokenizerKind
from training.schedule import DEFAULT_DECAY_SHARE, DEFAULT_WARMUP_SHARE

MICRO_BATCH_TOKENS = 8192  # of a rank at once where micro_batch is not given
RANKS_PER_HOST = 8  # of the usual GPU host, for check_only
VOCABULARIES = {TokenizerKind.bytes: 257, TokenizerKind.gpt2: 50257}  # known before a tokenizer is built
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # their product is the number of ranks; ep borrows from them


@dataclass(frozen=True)
class World:
    """The ranks of the run."""

    ranks: int
    ranks_per_host: int

    @classmethod
    def launched(cls) -> "World":
        """As torchrun, or a launcher with its environment, started this process; one rank without it."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))

    @classmethod
    def of(cls, config: Config) -> "World":
        """As launched; with check_only, the machine that hardware.gpus describes."""
        gpus, per_host = config.hardware.gpus, config.hardware.ranks_per_host
        if not config.check_only or gpus is None:
            return cls.launched()
        return cls(gpus, per_host or min(gpus, RANKS_PER_HOST))


@dataclass(frozen=True)
class Chosen:
    """What of the command a config does not hold.

    `groups`: the preset of each group, such as {"model": "gpt2_nano"}.
    `job`: the number of a sweep's job.
    `unresolved`: the text of each key whose value came from the environment; saved instead of the value, which may be a
    secret.
    `given`: the keys and groups of the command line."""

    groups: dict[str, str | None] = field(default_factory=dict)
    job: int | None = None
    unresolved: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def name(self) -> str:
        """Of the run, where none is given."""
        return (self.groups.get("experiment") or self.groups.get("model") or "run").replace("/", "-")


def data_ranks(config: Config) -> int:
    """Ranks that see different sequences."""
    return config.parallel.dp_replicate * config.parallel.dp_shard


def rank_sequences(batch_sequences: int, ranks: int, micro_batch: int = 1) -> int:
    """Sequences of a step on each of so many data ranks: whole micro-batches, as many on every rank. Where they are
    more than the batch, those beyond it have no labels and count for nothing."""
    return -(-batch_sequences // (ranks * micro_batch)) * micro_batch


def filling(config: Config) -> int:
    """Sequences of a step beyond the batch; 0 while it is not known how it is cut."""
    batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
    if not isinstance(micro, int) or batch is None or min(batch, micro, ranks) < 1:
        return 0
    return rank_sequences(batch, ranks, micro) * ranks - batch


def resolve(config: Config, world: World, chosen: Chosen) -> None:
    """Fills the config in place. What does not divide or is not known yet stays as it is; check names it.

    Of steps, tokens and epochs only steps is left, of batch_sequences and batch_tokens only batch_sequences. Epochs
    wait for the data (resolve_epochs). With eval_only the model and tokenizer are the checkpoint's: resolve_model is
    called when they are known."""
    _expand_home(config)
    _drop_unused(config, chosen)
    config.name = chosen.name() if config.name is None else config.name
    if chosen.job is not None:
        config.name = f"{config.name}-{chosen.job}"
    _resolve_degrees(config, world)
    if config.precision.dtype is Dtype.fp64:
        config.precision.reduce_dtype = Dtype.fp64
    _resolve_schedule(config)
    if not config.eval_only:
        resolve_model(config)


def _drop_unused(config: Config, chosen: Chosen) -> None:
    """What a preset says of experts, or of their auxiliary loss, where the command line takes these away."""
    moe, unused = config.model.moe, []
    if moe.experts == 0:
        unused = [name for name in MoE.__dataclass_fields__ if name != "experts"]
    elif moe.balance is Balance.none:
        unused = ["balance_weight"]
    if chosen.given & {"model.moe.experts", "model.moe.balance"}:
        for name in unused:
            if f"model.moe.{name}" not in chosen.given:
                setattr(moe, name, getattr(MoE(), name))


def _expand_home(config: Config) -> None:
    """~ in each path, which a shell leaves as it is in key=~/folder."""
    home = os.path.expanduser
    config.out = home(config.out)
    config.data.files = [home(path) for path in config.data.files]
    for owner, name in (
        (config.checkpoint, "dir"),
        (config.checkpoint, "load"),
        (config.tokenizer, "file"),
        (config.model, "init_from"),
        (config.data, "cache"),
    ):
        path = getattr(owner, name)
        setattr(owner, name, None if path is None else home(path))


def resolve_model(config: Config) -> None:
    """What follows from the model: ranks of its experts, tokenizer, vocabulary, sequence length, batch and
    micro-batch."""
    _resolve_experts(config)
    if config.tokenizer.kind is TokenizerKind.auto:
        meant = config.model.tokenizer
        plain = meant in (TokenizerKind.bytes.name, TokenizerKind.gpt2.name)
        config.tokenizer.kind = TokenizerKind[meant] if plain else TokenizerKind.tiktoken
        if not plain and config.tokenizer.name is None:
            config.tokenizer.name = meant
    if config.model.vocab_size is None:
        config.model.vocab_size = VOCABULARIES.get(config.tokenizer.kind)
    if config.sequence_length is None:
        config.sequence_length = config.model.context
    _resolve_batch(config, config.sequence_length)


def steps_of_epochs(config: Config, train_tokens: int) -> int:
    """Optimizer steps in config.epochs passes over `train_tokens`; the last step may begin the next pass."""
    assert config.epochs is not None and config.sequence_length is not None and config.batch_sequences is not None
    sequences = math.ceil(train_tokens / config.sequence_length)
    return math.ceil(Fraction(repr(config.epochs)) * sequences / config.batch_sequences)  # exact: 0.1 is a tenth


def resolve_epochs(config: Config, train_tokens: int) -> None:
    """Turns epochs, where they are given, into steps; a warm-up in steps can be checked then."""
    if config.epochs is not None:
        config.steps, config.epochs = steps_of_epochs(config, train_tokens), None


def _resolve_degrees(config: Config, world: World) -> None:
    """Replaces -1 by the rest of the ranks, twice -1 by the rest of a host (dp_shard) and then of all, and the strategy
    auto."""
    parallel = config.parallel
    if parallel.dp_replicate == parallel.dp_shard == -1:
        others = parallel.pp * parallel.cp * parallel.tp
        if others > 0 and world.ranks_per_host % others == 0:
            parallel.dp_shard = world.ranks_per_host // others
    open_degrees = [name for name in DEGREES if getattr(parallel, name) == -1]
    if len(open_degrees) == 1:
        others = math.prod(getattr(parallel, name) for name in DEGREES if name != open_degrees[0])
        if others > 0 and world.ranks % others == 0:
            setattr(parallel, open_degrees[0], world.ranks // others)
    if not config.eval_only:
        _resolve_experts(config)
    if parallel.strategy is Strategy.auto:
        copied = Strategy.single if parallel.dp_replicate == 1 else Strategy.ddp
        parallel.strategy = copied if parallel.dp_shard == 1 else Strategy.fsdp2
    if parallel.strategy is Strategy.single and (parallel.cp > 1 or experts_apart(config.model, parallel)):
        parallel.strategy = Strategy.ddp  # ranks have parts of gradients that nothing else sums


def _resolve_experts(config: Config) -> None:
    """Replaces ep=-1 by the most ranks that can share the experts: 1 without experts."""
    experts, parallel = config.model.moe.experts, config.parallel
    lenders = (parallel.dp_shard, parallel.cp, parallel.tp)
    if parallel.ep == -1 and min(lenders) >= 1 and experts >= 0:
        parallel.ep = math.gcd(experts, math.prod(lenders)) if experts > 0 else 1


def _resolve_schedule(config: Config) -> None:
    schedule = config.schedule
    if schedule.warmup_steps is schedule.warmup_tokens is schedule.warmup_share is None:
        schedule.warmup_share = DEFAULT_WARMUP_SHARE
    stable = schedule.kind is ScheduleKind.warmup_stable_decay
    if stable and schedule.decay_steps is schedule.decay_tokens is schedule.decay_share is None:
        schedule.decay_share = DEFAULT_DECAY_SHARE


def _resolve_batch(config: Config, sequence_length: int) -> None:
    if sequence_length < 1:
        return
    batch_tokens = config.batch_tokens or 0
    if config.batch_sequences is None and batch_tokens > 0 and batch_tokens % sequence_length == 0:
        config.batch_sequences, config.batch_tokens = batch_tokens // sequence_length, None
    if config.batch_sequences is None or config.batch_sequences < 1:
        return
    if config.tokens is not None and config.steps is None and config.epochs is None:
        config.steps, config.tokens = math.ceil(config.tokens / (config.batch_sequences * sequence_length)), None
    ranks = data_ranks(config)
    if config.micro_batch is None and ranks > 0:
        sequences = rank_sequences(config.batch_sequences, ranks)
        config.micro_batch = _micro_batch(sequences, sequence_length, config.parallel)


def _micro_batch(sequences: int, sequence_length: int, parallel: ParallelConfig) -> int:
    """The largest divisor of a rank's sequences with at most MICRO_BATCH_TOKENS tokens, of which the schedule of a
    pipeline can take as many as there are; at least 1."""
    most = max(1, min(sequences, MICRO_BATCH_TOKENS // sequence_length))
    fitting = [size for size in range(most, 0, -1) if sequences % size == 0]
    if parallel.pp > 1:
        fitting = [size for size in fitting if runs(parallel, sequences // size) and sequences // size >= parallel.pp]
    return fitting[0] if fitting else 1
