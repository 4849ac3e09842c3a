"""What is filled in, against the rules written out by brute force."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from parallel.config import Dtype, ParallelConfig, Strategy
from training.config import Config, HardwareConfig, ScheduleKind, TokenizerKind
from training.resolve import Chosen, World, data_ranks, resolve, resolve_epochs, resolve_model, steps_of_epochs

ALONE = World(1, 1)


def resolved(config: Config, world: World = ALONE, **groups: str) -> Config:
    resolve(config, world, Chosen(dict(groups)))
    return config


@pytest.mark.parametrize(
    ("given_degrees", "world", "replicate", "shard"),
    [
        ({"dp_shard": -1}, World(8, 8), 1, 8),
        ({"dp_shard": -1}, World(1, 1), 1, 1),
        ({"dp_replicate": -1}, World(16, 8), 16, 1),
        ({"dp_replicate": -1, "dp_shard": 4}, World(16, 8), 4, 4),
        ({"dp_replicate": 2, "dp_shard": -1}, World(16, 8), 2, 8),
        ({"dp_replicate": -1, "dp_shard": -1}, World(16, 8), 2, 8),
        ({"dp_replicate": -1, "dp_shard": -1}, World(4, 4), 1, 4),
        ({"dp_replicate": -1, "dp_shard": -1}, World(1, 1), 1, 1),
        ({"dp_replicate": 3, "dp_shard": -1}, World(8, 8), 3, -1),  # does not divide: check tells
    ],
)
def test_degrees(given_degrees: dict[str, int], world: World, replicate: int, shard: int) -> None:
    config = Config(steps=1, batch_sequences=96)
    config.parallel.strategy = Strategy.fsdp2
    for name, degree in given_degrees.items():
        setattr(config.parallel, name, degree)
    resolved(config, world)
    assert (config.parallel.dp_replicate, config.parallel.dp_shard) == (replicate, shard)


@settings(deadline=None)
@given(per_rank=st.integers(1, 400), ranks=st.integers(1, 9), length=st.integers(1, 20000))
def test_micro_batch_is_the_largest_divisor_of_8192_tokens(per_rank: int, ranks: int, length: int) -> None:
    parallel = ParallelConfig(strategy=Strategy.ddp, dp_replicate=-1)
    config = Config(steps=1, batch_sequences=per_rank * ranks, sequence_length=length, parallel=parallel)
    resolved(config, World(ranks, ranks))
    fits = [n for n in range(1, per_rank + 1) if per_rank % n == 0 and n * length <= 8192]
    assert config.micro_batch == max(fits, default=1)


def test_a_micro_batch_that_is_given_stays() -> None:
    assert resolved(Config(steps=1, batch_sequences=8, micro_batch=2)).micro_batch == 2
    assert resolved(Config(steps=1, batch_sequences=8, micro_batch="auto")).micro_batch == "auto"


def test_batch_and_length() -> None:
    config = resolved(Config(tokens=1_000_001, batch_tokens=2048))
    assert config.sequence_length == 128
    assert (config.batch_sequences, config.batch_tokens) == (16, None)
    assert (config.steps, config.tokens) == (489, None)  # 488.28 batches of 2048
    config = resolved(Config(steps=3, batch_tokens=1000))  # no multiple of 128: check tells
    assert (config.batch_sequences, config.batch_tokens, config.micro_batch) == (None, 1000, None)


@pytest.mark.parametrize(
    ("epochs", "tokens", "batch", "length", "steps"),
    [
        (1.0, 10_000, 4, 100, 25),
        (1.0, 10_001, 4, 100, 26),  # 101 sequences
        (1.1, 50, 1, 1, 55),  # 55.00000000000001 in floating point, and 55 here
        (2.5, 1_000, 5, 10, 50),
    ],
)
def test_epochs(epochs: float, tokens: int, batch: int, length: int, steps: int) -> None:
    config = resolved(Config(epochs=epochs, batch_sequences=batch, sequence_length=length))
    assert config.steps is None
    assert steps_of_epochs(config, tokens) == steps
    resolve_epochs(config, tokens)
    assert config.steps == steps
    assert config.epochs is None


def test_tokenizer_and_vocabulary_follow_from_the_model() -> None:
    config = resolved(Config(steps=1, batch_sequences=1, model=ModelConfig(tokenizer="bytes")))
    assert (config.tokenizer.kind, config.model.vocab_size) == (TokenizerKind.bytes, 257)
    config = resolved(Config(steps=1, batch_sequences=1, model=ModelConfig(tokenizer="gpt2")))
    assert (config.tokenizer.kind, config.model.vocab_size) == (TokenizerKind.gpt2, 50257)
    config = resolved(Config(steps=1, batch_sequences=1, model=ModelConfig(tokenizer="o200k_base")))
    assert (config.tokenizer.kind, config.tokenizer.name) == (TokenizerKind.tiktoken, "o200k_base")
    assert config.model.vocab_size is None
    assert config.model.ffn_dim is None


def test_schedule_defaults() -> None:
    config = resolved(Config(steps=1, batch_sequences=1))
    assert (config.schedule.warmup_share, config.schedule.decay_share) == (0.05, None)
    config = Config(steps=1, batch_sequences=1)
    config.schedule.kind, config.schedule.warmup_steps = ScheduleKind.warmup_stable_decay, 0
    resolved(config)
    assert (config.schedule.warmup_share, config.schedule.decay_share) == (None, 0.2)


def test_float64_sums_in_float64() -> None:
    config = Config(steps=1, batch_sequences=1)
    config.precision.dtype = Dtype.fp64
    assert resolved(config).precision.reduce_dtype is Dtype.fp64


def test_name() -> None:
    assert resolved(Config(), model="gpt2_124m").name == "gpt2_124m"
    assert resolved(Config(), model="gpt2_124m", experiment="mine/best").name == "mine-best"
    assert resolved(Config(name="given"), model="gpt2_124m").name == "given"


def test_eval_only_waits_for_the_model() -> None:
    config = resolved(Config(eval_only=True, steps=1, batch_sequences=4))
    assert (config.sequence_length, config.tokenizer.kind) == (None, TokenizerKind.auto)
    config.model = ModelConfig(context=64, tokenizer="bytes")
    resolve_model(config)
    assert (config.sequence_length, config.model.vocab_size) == (64, 257)


def test_twice_is_once() -> None:
    config = resolved(Config(tokens=10_000, batch_tokens=512), World(1, 1), model="m")
    again = resolved(resolved(Config(tokens=10_000, batch_tokens=512), model="m"), model="m")
    assert again == config


def test_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert World.of(Config()) == World(1, 1)
    assert World.of(Config(check_only=True, hardware=HardwareConfig(gpus=4))) == World(4, 4)
    assert World.of(Config(check_only=True, hardware=HardwareConfig(gpus=32))) == World(32, 8)
    assert World.of(Config(check_only=True, hardware=HardwareConfig(gpus=32, ranks_per_host=4))) == World(32, 4)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert World.of(Config(hardware=HardwareConfig(gpus=4))) == World(16, 8)
    config = Config(steps=1, batch_sequences=32, parallel=ParallelConfig(strategy=Strategy.fsdp2, dp_shard=-1))
    resolved(config, World.of(config))
    assert data_ranks(config) == 16 == math.prod((config.parallel.dp_replicate, config.parallel.dp_shard))


def test_home_is_meant_by_a_tilde_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = Config(steps=1, batch_sequences=8, out="~/runs")
    config.checkpoint.dir, config.checkpoint.load = "~/ck", "~/runs/base"
    config.tokenizer.file, config.data.cache = "~/t.json", "~"
    config.data.files = ["~/a/*.txt", "b~/~.txt"]
    resolved(config)
    assert config.out == "/home/me/runs"
    assert (config.checkpoint.dir, config.checkpoint.load) == ("/home/me/ck", "/home/me/runs/base")
    assert (config.tokenizer.file, config.data.cache) == ("/home/me/t.json", "/home/me")
    assert config.data.files == ["/home/me/a/*.txt", "b~/~.txt"]
    assert resolved(Config(steps=1, batch_sequences=8)).checkpoint.dir is None
