"""Each piece of advice where it is due, and silence where it is not."""

from dataclasses import replace

import pytest

from parallel.config import Dtype
from training.advice import Device, advice
from training.check import check
from training.compose import compose
from training.config import Config
from training.plan import GIB
from training.resolve import World, resolve

HOST, HOSTS = World(8, 8), World(16, 8)
H100 = Device(Dtype.bf16, 80 * GIB, 989.4e12)
SMALL = replace(H100, memory_bytes=2 * GIB)
UNKNOWN = Device(Dtype.fp32, None, None)
GPT2 = "model=gpt2_124m hardware.device=cuda batch_sequences=128 micro_batch=8 steps=1000"


def resolved(overrides: str, world: World) -> Config:
    config, chosen = compose(overrides.split())
    resolve(config, world, chosen)
    assert check(config, world) == []
    return config


def told(overrides: str, world: World = HOST, device: Device = H100) -> list[str]:
    """The keys of what is advised."""
    return [text.split(":")[0] for text in advice(resolved(overrides, world), world, device)]


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("parallel=fsdp2_tp", "parallel.tp=2"),
        ("parallel=fsdp2", "parallel.reshard_after_forward=true"),
        ("parallel=fsdp2 parallel.reshard_after_forward=4", "parallel.reshard_after_forward=4"),
    ],
)
def test_what_saves_memory_that_is_there(layout: str, key: str) -> None:
    assert told(f"{GPT2} {layout}") == [key]
    assert told(f"{GPT2} {layout}", device=SMALL) == []
    assert told(f"{GPT2} {layout}", device=UNKNOWN) == []


@pytest.mark.parametrize(
    "layout", ["parallel=ddp", "parallel=zero1", "parallel=fsdp2 parallel.reshard_after_forward=false"]
)
def test_no_word_of_what_keeps_parameters(layout: str) -> None:
    assert told(f"{GPT2} {layout}") == []


def test_activations_count_as_well() -> None:
    tight = replace(H100, memory_bytes=20 * GIB)
    assert told(f"{GPT2} parallel=fsdp2 micro_batch=1", device=tight) == ["parallel.reshard_after_forward=true"]
    assert told(f"{GPT2} parallel=fsdp2 micro_batch=16", device=tight) == []


def test_tensor_parallelism_is_right_where_there_are_fewer_sequences_than_ranks() -> None:
    assert told(f"{GPT2} parallel=tp parallel.tp=4 batch_sequences=2 micro_batch=1", World(4, 4)) == []


def test_a_pipeline_of_what_fits_a_device() -> None:
    staged = f"{GPT2} parallel=pp parallel.pp=2 parallel.dp_replicate=4 parallel.strategy=ddp"
    assert told(staged) == ["parallel.pp=2"]
    assert told(staged, device=SMALL) == []
    assert told(staged, device=UNKNOWN) == []
    assert told(f"{GPT2} parallel=3d") == ["parallel.tp=2", "parallel.pp=2"]


def test_tensor_parallelism_across_hosts() -> None:
    wide = "model.heads=16 model.dim=1024 parallel=fsdp2 parallel.tp=16 parallel.reshard_after_forward=false"
    assert told(f"{GPT2} {wide}", HOSTS, UNKNOWN) == ["parallel.tp=16"]
    assert "parallel.tp=8 " in advice(resolved(f"{GPT2} {wide}", HOSTS), HOSTS, UNKNOWN)[0]
    assert told(f"{GPT2} {wide} parallel.tp=8", HOSTS, UNKNOWN) == []
    assert told(f"{GPT2} {wide}", World(16, 16), UNKNOWN) == []


def test_full_recomputation_where_selective_fits() -> None:
    full = f"{GPT2} parallel=ddp activations=full"
    assert told(full) == ["activations=full"]
    assert told(full, device=SMALL) == []
    assert told(full, device=UNKNOWN) == []
    assert told(f"{GPT2} parallel=ddp activations=selective") == []
    assert told(f"{GPT2} parallel=ddp activations=segments") == []


def test_eager_on_a_long_run_with_gpus() -> None:
    # 6 x 124 M parameters and attention are 8.6e8 operations a token, 1.1e14 a step of 131,072 tokens; an hour of
    # 8 H100s is 2.8e19 operations, 251,000 steps
    long, short = "steps=300000 compile=none", "steps=200000 compile=none"
    assert told(f"{GPT2} parallel=ddp {long}") == ["compile=none"]
    assert told(f"{GPT2} parallel=ddp {short}") == []
    assert told(f"{GPT2} parallel=ddp steps=300000 compile=auto") == []
    assert told(f"{GPT2} parallel=ddp {long}", device=UNKNOWN) == []


def test_everything_at_once() -> None:
    both = "parallel=fsdp2 compile=none steps=1000000"
    assert told(f"{GPT2} {both}") == ["parallel.reshard_after_forward=true", "compile=none"]


def test_a_device_as_the_config_describes_it() -> None:
    assert Device.described(resolved("hardware=h100", World(1, 1))) == H100
    assert Device.described(resolved("", World(1, 1))) == UNKNOWN
    assert Device.described(resolved("hardware=cpu hardware.peak_tflops=1.0", World(1, 1))) == UNKNOWN
    assert Device.described(resolved("hardware=a100 precision=fp32", World(1, 1))) == Device(Dtype.fp32, None, 312e12)


def test_while_the_vocabulary_is_not_known_nothing_is_said_of_sizes() -> None:
    config = resolved(f"{GPT2} parallel=fsdp2 tokenizer=tiktoken tokenizer.name=cl100k_base", HOST)
    config.model.vocab_size = None
    assert advice(config, HOST, H100) == []
