"""Every rule between keys, and that what is suggested instead is legal."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig, Schedule, Strategy
from parallel.planning.stages import runs, stages
from training.check import RANGES, accumulation, check, describe
from training.compose import compose
from training.config import Config, leaves
from training.keys import keys
from training.refusal import Problem
from training.resolve import Chosen, World, resolve, resolve_model

ALONE = World(1, 1)


def made(world: World = ALONE, strategy: str = "single", **values: Any) -> Config:
    """A resolved config with the values at dotted keys (__ for a dot), enums by name."""
    config = Config(steps=100, batch_sequences=32)
    config.parallel.strategy = Strategy[strategy]
    for name, value in values.items():
        owner: Any = config
        *sections, last = name.split("__")
        for section in sections:
            owner = getattr(owner, section)
        now = getattr(owner, last)
        setattr(owner, last, type(now)[value] if hasattr(now, "name") and isinstance(value, str) else value)
    resolve(config, world, Chosen({"model": "m"}))
    return config


def problems(world: World = ALONE, strategy: str = "single", **values: Any) -> dict[str, Problem]:
    found = check(made(world, strategy, **values), world)
    assert len({problem.key for problem in found}) == len(found), found
    return {problem.key: problem for problem in found}


def test_the_default_is_right() -> None:
    assert problems() == {}


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("model__heads", 3, "model.heads=2 or model.heads=4, or model.dim=126 or model.dim=129"),
        ("model__heads", 300, "model.heads=128"),
        ("model__dim", 0, "model.dim=2"),
        ("model__vocab_size", 100, "model.vocab_size=null"),
        ("model__dropout", 1.0, "model.dropout=0.0"),
        ("model__mup_base_dim", 64, "model.mup_base_dim=null"),
        ("model__mup_base_head_dim", 64, "model.mup_base_head_dim=null"),
        ("model__parametrization", "mup", "model.mup_base_dim=128"),
        ("model__moe__top_k", 3, "model.moe.experts=8"),
        ("model__moe__groups", 2, "model.moe.experts=8"),
        ("model__latent__kv_rank", -1, "model.latent.kv_rank=0"),
        ("model__latent__rope_dim", 32, "model.latent.kv_rank=512"),
        ("model__mtp", -1, "model.mtp=0"),
        ("model__mtp", 1, "model.position=rotary, or model.mtp=0"),
        ("model__mtp_weight", 0.2, "model.mtp=1"),
        ("model__moe__experts", 1, "model.moe.experts=2"),
        ("model__moe__scale", 0.0, "model.moe.scale=1.0"),
        ("model__moe__capacity_factor", -1.0, "model.moe.capacity_factor=1.25"),
        ("model__moe__capacity_factor", 0.0, "model.moe.capacity_factor=1.25"),
        ("sequence_length", 257, "sequence_length=128"),
        ("steps", 0, "steps=1"),
        ("seed", -1, "seed=0"),
        ("micro_batch", "aut", "micro_batch=auto"),
        ("micro_batch", 0, "micro_batch=1"),
        ("optimizer__lr", 0.0, "optimizer.lr=0.001"),
        ("optimizer__lr", float("inf"), "optimizer.lr=0.001"),
        ("optimizer__beta2", 1.0, "optimizer.beta2=0.95"),
        ("optimizer__clip", -1.0, "optimizer.clip=1.0"),
        ("optimizer__compression", "bf16", "parallel=ddp, or optimizer.compression=none"),
        ("optimizer__powersgd_rank", 2, "optimizer.compression=powersgd"),
        ("optimizer__powersgd_rank", 0, "optimizer.powersgd_rank=4"),
        ("optimizer__powersgd_start_step", -1, "optimizer.powersgd_start_step=0"),
        ("spikes__threshold", -1.0, "spikes.threshold=0.0"),
        ("spikes__window", 0, "spikes.window=1"),
        ("spikes__before", -1, "spikes.before=0"),
        ("spikes__after", -1, "spikes.after=0"),
        ("spikes__max_rollbacks", 0, "spikes.max_rollbacks=1"),
        ("data__heldout", 1.0, "data.heldout=0.05"),
        ("data__heldout", 0.0, "evals=none"),
        ("data__files", ["a"], "data=text"),
        ("data__kind", "files", "data.files"),
        ("schedule__warmup_share", 1.1, "schedule.warmup_share="),
        ("schedule__warmup_steps", 101, "more steps"),
        ("schedule__decay_steps", 3, "schedule=warmup_stable_decay"),
        ("checkpoint__permanent_every", 700, "checkpoint.permanent_every=500 or checkpoint.permanent_every=1000"),
        ("checkpoint__permanent_steps", [0, 20], "checkpoint.permanent_steps=[20]"),
        ("checkpoint__ephemeral_every", -1, "checkpoint.ephemeral_every=0"),
        ("checkpoint__every_minutes", 0.0, "checkpoint.every_minutes="),
        ("checkpoint__dir", "s4://bucket/a", "s3://bucket/prefix"),
        ("checkpoint__dir", "s3://key:secret@bucket/a", "credentials in the environment"),
        ("checkpoint__keep_best", "heldout.los", "checkpoint.keep_best=heldout.loss or "),
        ("checkpoint__keep_best", "heldout", "checkpoint.keep_best=continuation.accuracy checkpoint.best_is=highest"),
        ("checkpoint__keep_best", "continuation.accuracy", "checkpoint.best_is=highest"),
        ("checkpoint__load_parts", "all", "checkpoint.load="),
        ("checkpoint__allow_changes", ["optimizer.lrr"], "checkpoint.allow_changes=[optimizer.lr]"),
        ("evals__tasks", ["heldot"], "evals.tasks=[heldout]"),
        ("evals__tasks", ["heldout", "heldout"], "evals.tasks=[heldout]"),
        ("parallel__tp", 2, "parallel.tp=1"),
        ("parallel__ep", 2, "parallel.ep=1"),
        ("activations__mode", "budget", "compile=block or compile=model"),
        ("activations__segments", 2, "activations=segments"),
        ("activations__segments", 0, "activations.segments=null"),
        ("activations__every_n", 3, "activations=every_n"),
        ("activations__every_n", 0, "activations.every_n=2"),
        ("activations__budget", 0.3, "activations=budget"),
        ("activations__budget", 0.0, "activations.budget=0.5"),
        ("activations__budget", 1.1, "activations.budget=0.5"),
        ("parallel__static_graph", True, "parallel=ddp"),
        ("parallel__reshard_after_forward", 2, "parallel=fsdp2"),
        ("precision__reduce_dtype", "tf32", "precision.reduce_dtype=fp32"),
        ("tokenizer__kind", "tiktoken", "tokenizer.name="),
        ("tokenizer__kind", "huggingface", "tokenizer.file="),
        ("tokenizer__name", "gpt2", "tokenizer=tiktoken"),
        ("name", "a/b", "name=a-b"),
        ("name", "..", "name=run"),
        ("out", " ", "out=outputs"),
        ("hardware__device", "gpu", "hardware.device=cuda"),
        ("hardware__gpus", 8, "torchrun --nproc-per-node 8"),
        ("metrics__wandb_project", "", "metrics.wandb_project=null"),
        ("eval_only", True, "checkpoint.load="),
        ("steps", None, "epochs="),
    ],
)
def test_one_problem_with_what_to_write(key: str, value: Any, instead: str) -> None:
    found = list(problems(**{key: value}).values())
    assert len(found) == 1, found
    assert instead in found[0].instead


def test_a_secret_in_a_url_is_not_said() -> None:
    for key in ("dir", "load", "mirror"):
        given: dict[str, Any] = {f"checkpoint__{key}": "s3://me:hunter2@bucket/run"}
        found = problems(**given)
        assert list(found) == [f"checkpoint.{key}"] and "hunter2" not in str(found[f"checkpoint.{key}"])


@pytest.mark.parametrize(
    ("values", "key", "instead"),
    [
        ({"spikes__window": 100}, "spikes.window", "spikes.window=10"),
        ({"checkpoint__every": 0}, "spikes.threshold", "checkpoint.every=500, or spikes.threshold=0"),
        ({"checkpoint__keep": 1}, "checkpoint.keep", "checkpoint.keep=2, or spikes.before=0"),
        ({"checkpoint__keep": 0}, "checkpoint.keep", "checkpoint.keep=2, or spikes.before=0"),
        (
            {"checkpoint__every": 10, "spikes__before": 21},
            "checkpoint.keep",
            "checkpoint.keep=4, or spikes.before=0",
        ),
    ],
)
def test_a_spike_has_a_checkpoint_to_go_back_to(values: dict[str, Any], key: str, instead: str) -> None:
    usual: dict[str, Any] = {"spikes__threshold": 20.0, "spikes__window": 10}
    assert problems(**usual) == {}
    found = problems(**usual | values)
    assert {name: problem.instead for name, problem in found.items()} == {key: instead}
    for way in instead.split(", or "):
        name, _, value = way.partition("=")
        assert problems(**usual | values | {name.replace(".", "__"): int(value)}) == {}, way
    assert problems(**usual | values | {"spikes__threshold": 0.0}) == {}


def test_mup_is_for_adam() -> None:
    given: dict[str, Any] = {"model__parametrization": "mup", "model__mup_base_dim": 64}
    assert problems(**given) == {}
    found = problems(**given, optimizer__kind="sgd")
    assert {key: problem.instead for key, problem in found.items()} == {
        "model.parametrization": "optimizer=adamw, or model.parametrization=standard model.mup_base_dim=null"
    }


@pytest.mark.parametrize(
    ("values", "instead"),
    [
        ({"top_k": 9}, "model.moe.top_k=2, or model.moe.experts=9"),
        ({"top_k": 1}, "model.moe.normalize=false, or model.moe.top_k=2"),
        ({"groups": 3}, "model.moe.groups=2"),
        ({"groups": 8}, "model.moe.groups=4"),
        ({"groups": 2, "top_groups": 3}, "model.moe.top_groups=2"),
        ({"top_groups": 2}, "model.moe.top_groups=1"),
        ({"groups": 4, "top_k": 3}, "model.moe.top_groups=2"),
        ({"dense_layers": 4}, "model.moe.dense_layers=3, or model.moe.experts=0 model.moe.dense_layers=0"),
        ({"balance_weight": 0.3}, "model.moe.balance=sequence, or leave it out"),
        ({"balance": "step", "balance_weight": 0.0}, "model.moe.balance_weight=0.01, or model.moe.balance=none"),
    ],
)
def test_keys_of_experts(values: dict[str, Any], instead: str) -> None:
    """What is suggested first is legal."""
    given = {"model__moe__experts": 8} | {f"model__moe__{name}": value for name, value in values.items()}
    (found,) = problems(**given).values()
    assert found.instead == instead
    word, _, value = instead.partition(",")[0].partition("=")
    meant: Any = {"false": False, "sequence": "sequence"}.get(value, value)
    if value.replace(".", "").isdigit():
        meant = float(value) if "." in value else int(value)
    assert problems(**given | {word.replace(".", "__"): meant}) == {}


@pytest.mark.parametrize(
    ("values", "key", "instead"),
    [
        ({"position": "learned"}, "position", "model.position=rotary"),
        ({"position": "none"}, "position", "model.position=rotary"),
        ({"latent__rope_dim": 7}, "latent.rope_dim", "model.latent.rope_dim=6 or model.latent.rope_dim=8"),
        ({"latent__value_dim": 193}, "latent.value_dim", "model.latent.value_dim=192"),
        ({"rotary__share": 0.5}, "rotary.share", "model.rotary.share=1.0"),
        ({"kv_heads": 1}, "kv_heads", "model.kv_heads=null"),
        ({"kv_heads": 3}, "kv_heads", "model.kv_heads=null"),
        ({"head_dim": 64}, "head_dim", "model.head_dim=null"),
        ({"qk_norm": "head"}, "qk_norm", "model.qk_norm=none"),
        ({"value_embeddings": 1}, "value_embeddings", "model.value_embeddings=0"),
        ({"value_embeddings": 3}, "value_embeddings", "model.value_embeddings=0"),
        ({"rotary__scaling": "yarn", "rotary__beta_slow": 40.0}, "rotary.beta_slow", "model.rotary.beta_slow=1.0"),
        ({"mtp": 1, "x0": True}, "x0", "model.x0=false, or model.mtp=0"),
        ({"mtp": 1, "skips": True}, "skips", "model.skips=false, or model.mtp=0"),
        ({"mtp": 1, "mtp_weight": 0.0}, "mtp_weight", "model.mtp_weight=0.3, or model.mtp=0"),
    ],
)
def test_latent_attention_and_further_tokens(values: dict[str, Any], key: str, instead: str) -> None:
    usual: dict[str, Any] = {"model__latent__kv_rank": 16, "model__position": "rotary"}
    assert problems(**usual, model__heads=3) == {}  # which needs not divide
    found = problems(**usual | {f"model__{name}": value for name, value in values.items()})
    assert list(found) == [f"model.{key}"]
    assert found[f"model.{key}"].instead == instead


def test_every_rule_is_of_a_key_and_every_number_has_one() -> None:
    ruled = [name for names, _, _ in RANGES for name in names.split()]
    assert len(ruled) == len(set(ruled))
    numbers = {key.name for key in keys().values() if {int, float} & set(key.kinds)}
    assert set(ruled) == numbers - {"micro_batch", "parallel.reshard_after_forward"}  # these have rules of their own


def test_all_at_once() -> None:
    found = problems(
        model__heads=3, optimizer__lr=-1.0, evals__tasks=["x"], batch_sequences=6, micro_batch=7, name="a b"
    )
    assert set(found) == {"model.heads", "optimizer.lr", "evals.tasks", "micro_batch", "name"}


def test_lengths_and_batches_are_given_once() -> None:
    assert set(problems(tokens=5)) == {"steps"}
    assert set(problems(steps=None, batch_sequences=None)) == {"steps", "batch_sequences"}
    assert set(problems(batch_tokens=256)) == {"batch_sequences"}
    assert (
        problems(batch_sequences=None, batch_tokens=1000)["batch_tokens"].instead
        == "batch_tokens=896 or batch_tokens=1024"
    )
    assert set(problems(schedule__warmup_steps=1, schedule__warmup_share=0.1)) == {"schedule.warmup_steps"}


def test_warm_up_and_decay_fit() -> None:
    assert problems(schedule__kind="warmup_stable_decay", schedule__warmup_share=0.8) == {}
    assert set(problems(schedule__kind="warmup_stable_decay", schedule__warmup_share=0.81)) == {"schedule.warmup_share"}
    assert set(problems(schedule__warmup_tokens=100 * 32 * 256 + 1)) == {"schedule.warmup_tokens"}


def test_kernels_and_devices() -> None:
    assert set(problems(model__attention="cudnn", hardware__device="cpu")) == {"model.attention"}
    assert set(problems(model__attention="flash", hardware__device="cuda", precision__dtype="fp32")) == {
        "model.attention"
    }
    assert problems(model__attention="flash", hardware__device="cuda") == {}
    assert set(problems(precision__dtype="tf32", hardware__device="cpu")) == {"precision.dtype"}


@pytest.mark.parametrize(
    ("kernel", "device", "values", "reason", "instead"),
    [
        ("flash2", "cpu", {}, "does not train on a CPU", "auto"),
        ("flex", "cpu", {}, "does not train on a CPU", "auto"),
        ("flash", "cpu", {"model__dropout": 0.1}, "drops nothing (model.dropout) on a CPU", "auto"),
        ("math", "cpu", {"model__attention_softcap": 20.0}, "bends no scores (model.attention_softcap)", "auto"),
        ("flash", "cuda", {"data__mask_documents": True}, "keeps no documents apart (data.mask_documents)", "auto"),
        ("flash", "cuda", {"model__window": 8}, "has no window (model.window)", "auto"),
        (
            "efficient",
            "cuda",
            {"precision__dtype": "fp64", "precision__reduce_dtype": "fp64"},
            "does not compute in float64",
            "precision=bf16",
        ),
        ("flash3", "cuda", {"model__attention_softcap": 20.0}, "bends no scores", "auto"),
        ("flash4", "cuda", {"model__window": 8}, "has no window", "auto"),
        ("varlen", "cuda", {"precision__dtype": "fp32"}, "does not compute in float32", "precision=bf16"),
        ("flex", "cuda", {"model__dropout": 0.1}, "drops nothing", "auto"),
        (
            "flash2",
            "cuda",
            {"model__dropout": 0.1, "model__attention_softcap": 20.0},
            "drops nothing where it bends scores",
            "auto",
        ),
    ],
)
def test_a_kernel_that_cannot_is_refused_by_name(
    kernel: str, device: str, values: dict[str, Any], reason: str, instead: str
) -> None:
    """And not with `auto`, nor where what it lacks is not asked for."""
    found = problems(model__attention=kernel, hardware__device=device, **values)
    assert set(found) == {"model.attention"}
    problem = found["model.attention"]
    assert problem.value == kernel and reason in problem.reason and instead in problem.instead
    assert problems(hardware__device=device, **values) == {}
    if "train" not in reason:
        assert problems(model__attention=kernel, hardware__device=device) == {}


def test_the_ring_has_no_masks_on_a_gpu() -> None:
    ring = {"parallel__cp": 2, "parallel__context": "ring", "parallel__dp_shard": -1}
    for more in ({"data__mask_documents": True}, {"model__window": 8}):
        assert set(problems(World(2, 2), "fsdp2", hardware__device="cuda", **ring, **more)) == {"parallel.context"}
        assert problems(World(2, 2), "fsdp2", hardware__device="cpu", **ring, **more) == {}
    assert problems(World(2, 2), "fsdp2", hardware__device="cuda", **ring) == {}


@pytest.mark.parametrize(
    ("strategy", "degrees", "world", "key", "instead"),
    [
        ("single", {}, World(4, 4), "parallel", "parallel=fsdp2 or parallel=ddp"),
        ("single", {"dp_shard": 4}, World(4, 4), "parallel.dp_shard", "parallel=fsdp2"),
        ("ddp", {"dp_replicate": 3}, World(8, 8), "parallel.dp_replicate", "parallel.dp_replicate=8"),
        ("ddp", {"dp_replicate": -1, "dp_shard": 2}, World(8, 8), "parallel.dp_shard", "parallel=hsdp"),
        ("fsdp2", {"dp_shard": 3}, World(8, 8), "parallel.dp_shard", "parallel.dp_shard=2 parallel.dp_replicate=4"),
        ("fsdp2", {"dp_shard": 16}, World(8, 8), "parallel.dp_shard", "parallel.dp_shard=8 parallel.dp_replicate=1"),
        ("fsdp2", {"dp_shard": 0}, World(8, 8), "parallel.dp_shard", "parallel.dp_shard=-1"),
        (
            "fsdp2",
            {"dp_replicate": 3, "dp_shard": -1},
            World(8, 8),
            "parallel.dp_replicate",
            "dp_shard=4 parallel.dp_repl",
        ),
        ("fsdp2", {"dp_replicate": -1, "dp_shard": -1}, World(12, 8), "parallel.dp_shard", "parallel.dp_shard=6"),
        ("fsdp2", {"dp_shard": -1, "pp": -1}, World(8, 8), "parallel.pp", "parallel.pp=2"),
    ],
)
def test_degrees(strategy: str, degrees: dict[str, int], world: World, key: str, instead: str) -> None:
    found = problems(world, strategy, **{f"parallel__{name}": degree for name, degree in degrees.items()})
    assert set(found) == {key}
    assert instead in found[key].instead


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_one_rank_is_told_how_to_start_more(axis: str, strategy: str) -> None:
    degrees: dict[str, Any] = {f"parallel__{axis}": 2}
    found = problems(strategy=strategy, **degrees)[f"parallel.{axis}"]
    assert found.instead == f"`torchrun --nproc-per-node 2 train.py ...` or parallel.{axis}=1"
    found = problems(strategy=strategy, check_only=True, **degrees)[f"parallel.{axis}"]
    assert found.instead == f"hardware.gpus=2 or parallel.{axis}=1"


def test_each_mode_of_activations_has_its_keys() -> None:
    modes: dict[str, dict[str, Any]] = {
        "segments": {"activations__segments": 4},
        "every_n": {"activations__every_n": 3},
        "budget": {"activations__budget": 1.0, "compile__scope": "model"},
    }
    for mode, values in modes.items():
        assert problems(activations__mode=mode, **values) == {}
    found = problems(activations__mode="segments", activations__segments=5)  # of a model of 4 layers
    assert found["activations.segments"].instead.startswith("activations.segments=4, or null")
    found = problems(activations__mode="full", activations__segments=2, activations__every_n=3, activations__budget=1.0)
    assert set(found) == {"activations.segments", "activations.every_n", "activations.budget"}


def test_a_budget_needs_a_compiled_graph() -> None:
    budget: dict[str, Any] = {"activations__mode": "budget"}
    assert set(problems(**budget, compile__scope="none", hardware__device="cuda")) == {"activations.mode"}
    assert set(problems(**budget, hardware__device="cpu")) == {"activations.mode"}
    assert problems(**budget, hardware__device="cuda") == {}
    assert problems(**budget, compile__scope="block") == {}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"compile__scope": "none", "compile__dynamic": True}, "compile.dynamic"),
        ({"compile__scope": "model", "parallel__bucket_cap_mb": 0.5}, "parallel.bucket_cap_mb"),
        ({"compile__scope": "model", "parallel__bucket_cap_mb": 1.0}, None),
        ({"compile__scope": "block", "parallel__bucket_cap_mb": 0.5, "compile__dynamic": True}, None),
    ],
)
def test_compile(values: dict[str, Any], key: str | None) -> None:
    found = problems(World(2, 2), "ddp", parallel__dp_replicate=2, **values)
    assert set(found) == ({key} if key else set())


def test_reshard_divides_the_shards() -> None:
    world = World(8, 8)
    assert problems(world, "fsdp2", parallel__dp_shard=-1, parallel__reshard_after_forward=4) == {}
    found = problems(world, "fsdp2", parallel__dp_shard=-1, parallel__reshard_after_forward=3)
    assert found["parallel.reshard_after_forward"].instead.startswith(
        "parallel.reshard_after_forward=2 or parallel.reshard_after_forward=4"
    )


@pytest.mark.parametrize(
    ("values", "key", "reason", "instead"),
    [
        ({"parallel__tp": 3}, "parallel.tp", "does not divide the 8 ranks", "parallel.tp=2 or parallel.tp=4"),
        ({"parallel__tp": 8}, "parallel.tp", "model.heads=12", "parallel.tp=4"),
        ({"model__kv_heads": 2, "parallel__tp": 4}, "parallel.tp", "model.kv_heads=2", "parallel.tp=2"),
        (
            {"model__kv_heads": 5, "parallel__tp": 1},
            "model.kv_heads",
            "must divide",
            "model.kv_heads=4 or model.kv_heads=6",
        ),
        ({"sequence_length": 90}, "sequence_length", "equal parts", "sequence_length=88 or sequence_length=92"),
        ({"model__context": 130}, "model.context", "equal parts", "model.context=128 or model.context=132"),
        ({"model__ffn_dim": 3}, "model.ffn_dim", "with nothing", "model.ffn_dim=4"),
        ({"model__ffn_dim": 6}, "model.ffn_dim", "with nothing", "model.ffn_dim=4 or model.ffn_dim=8"),  # 2, 2, 2, 0
        (
            {"model__moe__experts": 2, "model__moe__shared": 2, "model__moe__dim": 3},
            "model.moe.dim",
            "model.moe.shared=2 cut over parallel.tp=4 as torch.chunk does leaves a rank with nothing",
            "model.moe.dim=4",
        ),
        ({"parallel__dp_shard": 4}, "parallel.dp_shard", "there are 2 ranks (times tp 4)", "parallel.dp_shard=2"),
        ({"parallel__async_tp": True, "hardware__device": "cpu"}, "parallel.async_tp", "GPU", "async_tp=false"),
        ({"parallel__async_tp": True, "compile__scope": "none"}, "parallel.async_tp", "compiler", "compile=block"),
        ({"parallel__async_tp": True, "parallel__tp": 1}, "parallel.async_tp", "there is no", "parallel.tp=2"),
    ],
)
def test_tensor_parallelism(values: dict[str, Any], key: str, reason: str, instead: str) -> None:
    usual = {
        "parallel__tp": 4,
        "parallel__dp_shard": -1,
        "model__dim": 96,
        "model__heads": 12,
        "model__context": 96,
        "sequence_length": 96,
    }
    found = problems(World(8, 8), "fsdp2", **(usual | values))
    assert set(found) == {key}
    assert reason in found[key].reason
    assert instead in found[key].instead


def test_every_broken_rule_of_tensor_parallelism_at_once() -> None:
    found = problems(
        World(8, 8), "fsdp2", parallel__tp=8, model__heads=4, model__dim=96, sequence_length=90, model__context=100
    )
    assert set(found) >= {"parallel.tp", "sequence_length", "model.context"}


def test_ranks_that_only_tensor_parallelism_shares() -> None:
    assert problems(World(2, 2), parallel__tp=-1) == {}
    assert "parallel=fsdp2 parallel.tp=2" in problems(World(4, 4), parallel__tp=2)["parallel.tp"].instead
    assert problems(World(4, 4), "ddp", parallel__tp=2, parallel__dp_replicate=-1) == {}
    found = problems(World(4, 4), "ddp", parallel__tp=2, parallel__dp_replicate=-1, parallel__bucket_cap_mb=1.0)
    assert set(found) == {"parallel.bucket_cap_mb"}


@pytest.mark.parametrize(
    ("values", "key", "instead"),
    [
        ({"parallel__pp": 3}, "parallel.pp", "parallel.pp=2 or parallel.pp=4"),
        ({"model__layers": 3}, "parallel.pp", "model.layers=4"),
        (
            {"parallel__schedule": "zbv", "parallel__reshard_after_forward": False, "model__layers": 7},
            "parallel.pp",
            "parallel.schedule=1f1b or model.layers=8",
        ),
        ({"parallel__stages_per_rank": 2}, "parallel.stages_per_rank", "parallel.schedule=interleaved_1f1b"),
        (
            {"parallel__schedule": "looped_bfs", "parallel__stages_per_rank": 1},
            "parallel.stages_per_rank",
            "parallel.stages_per_rank=2, or parallel.schedule=1f1b",
        ),
        ({"parallel__stage_layers": [4, 4, 2]}, "parallel.stage_layers", "parallel.stage_layers=[3,3,3,3], or null"),
        ({"parallel__stage_layers": [4, 4, 4, 1]}, "parallel.stage_layers", "parallel.stage_layers=[3,3,3,3]"),
        ({"parallel__stage_layers": [12]}, "parallel.stage_layers", "parallel.stage_layers=[3,3,3,3]"),
        ({"parallel__stage_layers": [0, 4, 4, 4]}, "parallel.stage_layers", "parallel.stage_layers=[3,3,3,3]"),
        ({"micro_batch": "auto"}, "micro_batch", "micro_batch=1"),
        ({"micro_batch": 17}, "micro_batch", "micro_batch=2 or micro_batch=4"),
        ({"batch_sequences": 1}, "batch_sequences", "batch_sequences=8"),
        ({"batch_sequences": 2}, "micro_batch", "batch_sequences=8"),
        (
            {"parallel__schedule": "interleaved_1f1b", "batch_sequences": 36, "micro_batch": 2},
            "micro_batch",
            "batch_sequences=",
        ),
        ({"micro_batch": 8}, "micro_batch", "micro_batch=2 or micro_batch=4 or batch_sequences=64"),
        ({"parallel__schedule": "zbv"}, "parallel.reshard_after_forward", "parallel.reshard_after_forward=false"),
        ({"parallel__reduce": "micro_batch"}, "parallel.reduce", "parallel.reduce=auto"),
        ({"parallel__pp": 1, "parallel__schedule": "zbv"}, "parallel.schedule", "parallel.pp=2"),
        (
            {"parallel__schedule": "zbv", "parallel__reshard_after_forward": False, "activations__mode": "full"},
            "activations.mode",
            "activations=none",
        ),
        (
            {"parallel__schedule": "zbv", "parallel__reshard_after_forward": False, "compile__scope": "block"},
            "compile.scope",
            "compile=none",
        ),
    ],
)
def test_pipelines(values: dict[str, Any], key: str, instead: str) -> None:
    usual = {"parallel__pp": 4, "parallel__dp_shard": -1, "model__layers": 12}
    found = problems(World(8, 8), "fsdp2", **(usual | values))
    assert set(found) == {key}
    assert instead in found[key].instead


@settings(deadline=None, max_examples=300)
@given(
    pp=st.integers(2, 5),
    layers=st.integers(1, 12),
    schedule=st.sampled_from(list(Schedule)),
    each=st.sampled_from([None, 1, 2, 3]),
    cut=st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=6),
    batch=st.integers(1, 24),
    micro=st.integers(1, 4),
)
def test_a_pipeline_that_passes_can_run_and_what_is_suggested_passes(
    pp: int, layers: int, schedule: Schedule, each: int | None, cut: list[int] | None, batch: int, micro: int
) -> None:
    world = World(pp, pp)
    values: dict[str, Any] = {"model__layers": layers, "batch_sequences": batch, "micro_batch": micro}
    keys: dict[str, Any] = {
        "parallel__schedule": schedule,
        "parallel__stages_per_rank": each,
        "parallel__stage_layers": cut,
    }
    found = problems(world, parallel__pp=pp, **keys, **values)
    if not found:
        config = made(world, parallel__pp=pp, **keys, **values)
        assert runs(config.parallel, math.ceil(batch / micro))
        assert sum(len(stage.layers) for stage in stages(config.model, config.parallel)) == layers
        return
    for problem in found.values():
        for way in filter(lambda way: "=" in way, re.split(r",? or ", problem.instead)):
            typed = dict(re.findall(r"([\w.]+)=(\[[\d,]+\]|\w+)", way))
            strategy = typed.pop("parallel", "single")
            mended = {
                key.replace(".", "__"): json.loads(v) if v[0] == "[" or v.isdigit() else v for key, v in typed.items()
            }
            shards = {} if strategy == "single" else {"parallel__dp_shard": -1}
            left = problems(world, strategy, **({"parallel__pp": pp} | shards | keys | values | mended))
            assert problem.key not in left or left[problem.key].reason != problem.reason, (problem, way)


@pytest.mark.parametrize(
    ("ranks", "words", "key"),
    [
        (2, "parallel=pp parallel.schedule=interleaved_1f1b parallel.stages_per_rank=0", "parallel.stages_per_rank"),
        (1, "parallel.stages_per_rank=0", "parallel.stages_per_rank"),
        (2, "parallel=pp micro_batch=0", "micro_batch"),
        (2, "parallel=pp micro_batch=128", "micro_batch"),
        (2, "parallel=pp micro_batch=16", "micro_batch"),
        (4, "parallel=fsdp2 parallel.pp=2 batch_sequences=1", "batch_sequences"),
        (2, "parallel.pp=2 batch_sequences=0", "batch_sequences"),
        (2, "parallel.pp=2 batch_tokens=0 batch_sequences=null", "batch_tokens"),
        (6, "parallel=pp parallel.tp=3", "parallel.tp"),
        (9, "parallel.pp=9 batch_sequences=16", "parallel.pp"),
        (4, "parallel.pp=3 model.layers=2", "parallel.pp"),
        (2, "parallel=ddp parallel.pp=2 parallel.reduce=micro_batch", "parallel.reduce"),
        (2, "parallel=ddp parallel.pp=2 parallel.static_graph=true", "parallel.static_graph"),
        (4, "parallel.pp=4 batch_sequences=26 parallel.schedule=interleaved_1f1b model.layers=8", "micro_batch"),
    ],
)
def test_what_is_suggested_for_a_pipeline_passes_as_it_is_typed(ranks: int, words: str, key: str) -> None:
    """Each way, beside what was typed: nothing is left to refuse."""
    typed = dict(word.split("=", 1) for word in words.split())
    (problem,) = (problem for problem in typed_problems(ranks, typed) if problem.key == key)
    ways = mended_ways(typed, problem)
    assert ways
    for way, mended in ways:
        assert typed_problems(ranks, mended) == [], (problem, way)
        if mended.get("parallel") != typed.get("parallel"):  # another preset
            assert typed.get("parallel") != "pp" or "parallel.pp" in mended


MOE = "model=moe_debug"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{MOE} parallel.ep=2"),
        (3, f"{MOE} parallel.ep=2"),
        (3, f"{MOE} parallel=moe_ep parallel.tp=4 parallel.ep=3"),
        (4, f"{MOE} parallel.pp=2 parallel.ep=2"),
        (4, f"{MOE} parallel.tp=2 parallel.ep=4"),
        (8, f"{MOE} parallel=ddp parallel.ep=2"),
        (8, f"{MOE} parallel=fsdp2 parallel.ep=0"),
        (4, "parallel=fsdp2 parallel.ep=8"),
        (7, "parallel=fsdp2 parallel.cp=2 parallel.tp=2"),
        (7, "parallel=fsdp2 parallel.pp=2 parallel.tp=2 parallel.cp=2"),
        (12, f"{MOE} parallel=fsdp2 parallel.cp=2 parallel.tp=3"),
        (9, "parallel=fsdp2 parallel.cp=3 parallel.tp=3"),
        (6, "parallel=fsdp2 parallel.cp=3"),
        (2, "parallel=fsdp2 parallel.cp=2 model.context=126"),
        (2, "parallel=fsdp2 parallel.cp=2 model.context=126 sequence_length=64"),
        (2, "parallel=fsdp2 parallel.cp=2 sequence_length=126"),
        (8, "parallel=tp parallel.cp=2"),
        (8, "parallel=fsdp2 parallel.dp_shard=-1 parallel.tp=-1 parallel.cp=2"),
        (3, "parallel=tp parallel.cp=2 parallel.pp=2"),
        (3, "parallel=ddp batch_sequences=2"),
        (3, "parallel=ddp batch_sequences=9 micro_batch=4"),
        (3, "parallel=ddp parallel.dp_replicate=2"),
        (6, "parallel=fsdp2 parallel.dp_replicate=4"),
        (2, f"{MOE} parallel.tp=3 parallel.ep=8"),
        (1, f"{MOE} parallel=fsdp2 parallel.tp=3 parallel.pp=3"),
        (12, f"{MOE} parallel=hsdp parallel.cp=2 parallel.ep=4 parallel.dp_shard=4"),
        (12, f"{MOE} parallel=fsdp2 parallel.pp=5 parallel.ep=8"),
        (10, f"{MOE} parallel=fsdp2 parallel.pp=5 parallel.ep=2"),
        (1, f"{MOE} model.moe.dense_layers=4"),
        (1, f"{MOE} model.moe.balance_weight=0"),
        (1, "model.moe.balance_weight=0"),
        (1, "model.moe.balance_weight=0.3"),
        (1, "model.moe.top_k=9"),
        (1, "model.moe.experts=8 model.moe.balance=step model.moe.balance_weight=0"),
        (4, f"{MOE} parallel=ddp optimizer.compression=powersgd optimizer.powersgd_start_step=0"),
        (4, "parallel=fsdp2 optimizer.compression=powersgd optimizer.powersgd_start_step=0"),
        (
            4,
            "parallel=ddp optimizer.compression=powersgd optimizer.powersgd_start_step=0 "
            "parallel.allow_mixed_devices=true",
        ),
        (1, "optimizer.powersgd_rank=2"),
        (1, "optimizer.powersgd_rank=2 optimizer.compression=bf16 parallel=ddp"),
        (2, "parallel.tp=2 optimizer.powersgd_rank=2"),
    ],
)
def test_what_is_suggested_passes_as_it_is_typed(ranks: int, words: str) -> None:
    """Each way of each problem, beside what was typed: nothing is left to refuse but what was told with it."""
    typed = dict(word.split("=", 1) for word in words.split())
    told = typed_problems(ranks, typed)
    assert told
    for problem in told:
        others = {(other.key, other.reason) for other in told if other.key != problem.key}
        ways = mended_ways(typed, problem)
        assert ways
        for way, mended in ways:
            left = typed_problems(ranks, mended)
            assert {(other.key, other.reason) for other in left} <= others, (problem, way)


@pytest.mark.parametrize(
    ("ranks", "words", "instead"),
    [
        (2, "parallel.ep=2", "parallel=fsdp2 parallel.ep=2"),
        (4, "parallel.pp=2 parallel.ep=2", "parallel=fsdp2 parallel.pp=2 parallel.ep=2"),
        (8, "parallel=ddp parallel.ep=2", "parallel=fsdp2 parallel.ep=2"),
    ],
)
def test_copies_lend_no_ranks_to_experts(ranks: int, words: str, instead: str) -> None:
    (problem,) = typed_problems(ranks, {"model": "moe_debug", **dict(word.split("=") for word in words.split())})
    assert (problem.key, problem.instead) == ("parallel.ep", instead)


@pytest.mark.parametrize(
    ("ranks", "words", "ep"),
    [
        (4, "parallel=moe_ep", 4),
        (8, "parallel=fsdp2 parallel.ep=-1", 8),
        (16, "parallel=fsdp2 parallel.ep=-1 batch_sequences=16", 8),  # experts
        (12, "parallel=fsdp2 parallel.ep=-1 model.moe.experts=18 batch_sequences=12", 6),
        (8, "parallel=fsdp2 parallel.ep=-1 parallel.dp_replicate=2", 4),
        (8, "parallel=fsdp2 parallel.ep=-1 parallel.pp=2", 4),
        (8, "parallel=fsdp2 parallel.ep=-1 parallel.tp=2 parallel.cp=2", 8),
        (2, "parallel=tp parallel.ep=-1", 2),
        (8, "parallel=ddp parallel.ep=-1", 1),
        (1, "parallel.ep=-1", 1),
        (8, "parallel=moe_ep model=gpt2_nano", 1),  # without experts
    ],
)
def test_the_most_ranks_that_can_share_experts(ranks: int, words: str, ep: int) -> None:
    """The greatest common divisor of the 8 experts and the ranks of a copy."""
    typed = {"model": "moe_debug", **dict(word.split("=") for word in words.split())}
    config, chosen = compose([f"{name}={value}" for name, value in typed.items()])
    resolve(config, World(ranks, ranks), chosen)
    assert check(config, World(ranks, ranks)) == []
    assert config.parallel.ep == ep


def test_a_checkpoints_experts_are_shared_once_they_are_known() -> None:
    asked: dict[str, Any] = {"eval_only": True, "checkpoint__load": "a", "parallel__dp_shard": -1, "parallel__ep": -1}
    known = made(World(8, 8), "fsdp2", **asked)
    assert check(known, World(8, 8)) == [] and known.parallel.ep == -1
    known.model.moe.experts = 4
    resolve_model(known)
    assert check(known, World(8, 8)) == [] and known.parallel.ep == 4


@pytest.mark.parametrize("words", ["model.moe.experts=0", "model.moe.balance=none"])
def test_what_a_preset_says_of_experts_that_are_taken_away(words: str) -> None:
    """Is as if it were not said; what is typed beside it is refused, as without a preset."""
    assert typed_problems(1, {"model": "moe_debug", **dict([words.split("=")])}) == []
    typed = {"model": "moe_debug", **dict([words.split("=")]), "model.moe.balance_weight": "0.3"}
    assert [problem.key for problem in typed_problems(1, typed)] == ["model.moe.balance_weight"]


def mended_ways(typed: dict[str, str], problem: Problem) -> list[tuple[str, dict[str, str]]]:
    """Each way that a problem's message suggests, with the words of the command as it mends them."""
    ways = [way for way in re.split(r"[,;]? or ", problem.instead) if "=" in way or way == "leave it out"]
    without = {name: value for name, value in typed.items() if name != problem.key}
    return [(way, typed | dict(word.split("=") for word in way.split()) if "=" in way else without) for way in ways]


def typed_problems(ranks: int, typed: dict[str, str]) -> list[Problem]:
    config, chosen = compose(["hardware.device=cpu", *(f"{name}={value}" for name, value in typed.items())])
    world = World(ranks, ranks)
    resolve(config, world, chosen)
    return check(config, world)


def test_further_tokens_go_with_every_schedule() -> None:
    model: dict[str, Any] = {"model__mtp": 2, "model__position": "rotary", "model__layers": 4}
    for schedule in Schedule:
        values = model | {"parallel__schedule": schedule, "parallel__pp": 2, "micro_batch": 1}
        assert not problems(World(2, 2), "single", **values), schedule


def test_a_checkpoints_model_is_not_another_one_for_a_pipeline() -> None:
    values: dict[str, Any] = {"parallel__schedule": "zbv", "model__layers": 4, "checkpoint__load": "a"}
    known = made(World(3, 3), parallel__pp=3, eval_only=True, **values)
    resolve_model(known)
    (problem,) = check(known, World(3, 3))
    assert problem.key == "parallel.pp" and "model." not in problem.instead and "pp=1" in problem.instead


@pytest.mark.parametrize(
    ("values", "key", "reason", "instead"),
    [
        ({"parallel__cp": 3}, "parallel.cp", "does not divide the 8 ranks", "parallel.cp=2 or parallel.cp=4"),
        ({"sequence_length": 90}, "sequence_length", "2 x parallel.cp=4 equal", "sequence_length=88 or sequence_len"),
        ({"model__context": 98}, "model.context", "equal parts", "model.context=96 or model.context=104"),
        ({"parallel__tp": 2, "sequence_length": 88}, "sequence_length", "parallel.tp=2", "sequence_length=80 or "),
        ({"parallel__context": "ulysses", "model__kv_heads": 2}, "parallel.context", "model.kv_heads=2", "=gather"),
        ({"parallel__context": "ring", "model__dropout": 0.1}, "parallel.context", "dropout", "model.dropout=0"),
        ({"parallel__context": "ring", "model__attention": "math"}, "parallel.context", "math", "model.attention=auto"),
        ({"parallel__cp": 1, "parallel__context": "ring"}, "parallel.context", "no ranks share", "parallel.cp=2"),
        ({"parallel__dp_shard": 4}, "parallel.dp_shard", "there are 2 ranks (times cp 4)", "parallel.dp_shard=2"),
    ],
)
def test_context_parallelism(values: dict[str, Any], key: str, reason: str, instead: str) -> None:
    usual = {
        "parallel__cp": 4,
        "parallel__dp_shard": -1,
        "model__dim": 96,
        "model__heads": 12,
        "model__context": 96,
        "sequence_length": 96,
    }
    found = problems(World(8, 8), "fsdp2", **(usual | values))
    assert set(found) == {key}
    assert reason in found[key].reason
    assert instead in found[key].instead


@pytest.mark.parametrize(
    ("values", "key", "reason", "instead"),
    [
        ({"parallel__ep": 3}, "parallel.ep", "model.moe.experts=8", "parallel.ep=2 or parallel.ep=4"),
        ({"model__moe__experts": 6}, "parallel.ep", "dp_shard x cp x tp = 8", "parallel.ep=2"),
        ({"model__moe__experts": 0}, "parallel.ep", "no experts", "parallel.ep=1, or model.moe.experts=16"),
        ({"parallel__ep": 0}, "parallel.ep", "at least 1", "parallel.ep=-1"),
        ({"compile__scope": "model"}, "compile.scope", "any number of tokens", "compile=block"),
        ({"compile__scope": "model", "parallel__ep": 1, "parallel__tp": 2}, "compile.scope", "any number", "tp=1"),
    ],
)
def test_expert_parallelism(values: dict[str, Any], key: str, reason: str, instead: str) -> None:
    usual = {"parallel__ep": 4, "parallel__dp_shard": -1, "model__moe__experts": 8}
    found = problems(World(8, 8), "fsdp2", **(usual | values))
    assert set(found) == {key}
    assert reason in found[key].reason
    assert instead in found[key].instead


def test_experts_borrow_ranks_from_every_axis_that_shares_a_copy() -> None:
    for degrees in (
        {"dp_shard": -1},
        {"cp": 8},
        {"tp": 2, "cp": 4},
        {"tp": 2, "dp_shard": 4},
        {"cp": 2, "dp_shard": 4},
    ):
        given = {f"parallel__{axis}": degree for axis, degree in degrees.items()}
        sizes = {"model__moe__experts": 8, "model__heads": 8, "model__dim": 64, "batch_sequences": 24, "micro_batch": 1}
        assert problems(World(8, 8), "fsdp2", parallel__ep=8, **given, **sizes) == {}
    found = problems(World(4, 4), "ddp", parallel__ep=2, parallel__dp_replicate=-1, model__moe__experts=8)
    assert "dp_shard x cp x tp = 1" in found["parallel.ep"].reason  # copies are whole


@settings(deadline=None, max_examples=200)
@given(
    strategy=st.sampled_from(["single", "ddp", "fsdp2"]),
    axis=st.sampled_from(["cp", "tp", "pp"]),
    degree=st.integers(1, 9),
    cp=st.sampled_from([1, 2, 3]),
    context=st.sampled_from(["gather", "ulysses"]),
    world=st.sampled_from([World(1, 1), World(2, 2), World(6, 6), World(8, 8), World(12, 6)]),
    length=st.sampled_from([48, 64, 96]),
)
def test_degrees_that_are_suggested_are_legal(
    strategy: str, axis: str, degree: int, cp: int, context: str, world: World, length: int
) -> None:
    """As they are typed, beside what was given."""
    open_degree = {"single": {}, "ddp": {"parallel__dp_replicate": -1}, "fsdp2": {"parallel__dp_shard": -1}}
    given: dict[str, Any] = {"parallel__cp": cp, f"parallel__{axis}": degree}
    given |= {"parallel__context": context} if given["parallel__cp"] > 1 else {}
    sizes = {"model__layers": 12, "model__dim": 96, "model__heads": 12, "model__context": 96, "sequence_length": length}
    sizes |= {"batch_sequences": 144, "micro_batch": 1}
    key = f"parallel.{axis}"
    for problem in check(made(world, strategy, **(open_degree[strategy] | given | sizes)), world):
        ways = re.split(r",? or ", problem.instead) if problem.key == key else []
        for way in filter(lambda way: "=" in way, ways):
            typed = dict(re.findall(r"([\w.]+)=(\w+)", way))
            chosen = typed.pop("parallel", strategy)
            mended = {name.replace(".", "__"): int(value) for name, value in typed.items()}
            left = check(made(world, chosen, **(open_degree[chosen] | given | sizes | mended)), world)
            assert key not in {other.key for other in left}, (problem, way, left)


def test_compressed_gradients_need_torchs_ddp() -> None:
    world = World(2, 2)
    for kind in ("bf16", "fp16", "powersgd"):
        asked = {"optimizer__compression": kind, "steps": 5000}
        assert problems(world, "ddp", parallel__dp_replicate=2, **asked) == {}
        assert problems(world, "ddp", parallel__dp_replicate=2, eval_only=True, **asked).keys() == {"eval_only"}
        found = problems(world, "fsdp2", parallel__dp_shard=2, **asked)
        assert {key: problem.instead for key, problem in found.items()} == {
            "optimizer.compression": "parallel=ddp, or optimizer.compression=none"
        }
        found = problems(world, "ddp", parallel__dp_replicate=1, parallel__tp=2, **asked)
        assert [problem.instead for problem in found.values()] == ["optimizer.compression=none"]


def test_powersgd_begins_within_the_run_and_on_devices_that_round_alike() -> None:
    asked: dict[str, Any] = {"parallel__dp_replicate": 2, "optimizer__compression": "powersgd"}
    found = problems(World(2, 2), "ddp", steps=50, **asked)
    assert [problem.instead for problem in found.values()] == [
        "optimizer.powersgd_start_step=5, or optimizer.compression=none"
    ]
    assert problems(World(2, 2), "ddp", steps=50, optimizer__powersgd_start_step=49, **asked) == {}
    asked |= {"steps": 5000, "parallel__allow_mixed_devices": True}
    assert problems(World(2, 2), "ddp", **asked).keys() == {"parallel.allow_mixed_devices"}
    assert problems(World(2, 2), "ddp", **(asked | {"optimizer__compression": "bf16"})) == {}


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_keys_of_torchs_ddp_where_fsdp2_stands_in(axis: str) -> None:
    degrees: dict[str, Any] = {f"parallel__{axis}": 2, "parallel__dp_replicate": -1}
    assert problems(World(4, 4), "ddp", **degrees) == {}
    assert set(problems(World(4, 4), "ddp", **degrees, parallel__bucket_cap_mb=3.0)) == {"parallel.bucket_cap_mb"}


def test_a_layout_to_score_in_is_not_judged_by_a_model_that_is_not_its_own() -> None:
    """Nor by the micro-batches of a training that does not happen."""
    asked: dict[str, Any] = {"eval_only": True, "checkpoint__load": "a", "model__layers": 1}
    for strategy, degree in (("single", "parallel__tp"), ("single", "parallel__pp")):
        assert problems(World(8, 8), strategy, **{degree: 8}, **asked) == {}
    known = made(World(8, 8), parallel__pp=8, **asked)
    resolve_model(known)
    assert {problem.key for problem in check(known, World(8, 8))} == {"parallel.pp"}
    known.model.layers, known.parallel.schedule = 24, Schedule["dualpipev"]
    assert check(known, World(8, 8)) == []


def test_a_micro_batch_that_is_not_given_suits_the_schedule() -> None:
    world = World(8, 8)
    for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"):
        config = made(
            world, "fsdp2", parallel__pp=4, parallel__dp_shard=-1, model__layers=12, parallel__schedule=schedule
        )
        assert check(config, world) == []
        assert accumulation(config, world) == 4


@settings(deadline=None, max_examples=200)
@given(
    strategy=st.sampled_from(["ddp", "fsdp2"]),
    replicate=st.sampled_from([-1, 1, 2, 3, 4]),
    shard=st.sampled_from([-1, 1, 2, 3, 4]),
    world=st.sampled_from([World(1, 1), World(2, 2), World(6, 3), World(8, 8), World(16, 8)]),
)
def test_what_passes_uses_every_rank_and_what_is_suggested_passes(
    strategy: str, replicate: int, shard: int, world: World
) -> None:
    degrees = {"parallel__dp_replicate": replicate, "parallel__dp_shard": shard}
    config = made(world, strategy, batch_sequences=48, micro_batch=1, **degrees)
    found = [problem for problem in check(config, world) if problem.key.startswith("parallel")]
    if not found:
        assert config.parallel.dp_replicate * config.parallel.dp_shard == world.ranks
        assert strategy == "fsdp2" or config.parallel.dp_shard == 1
        return
    for choice in found[0].instead.partition(";")[0].split(" or "):
        numbers = {name: int(number) for name, number in re.findall(r"parallel\.(dp_\w+)=(\d+)", choice)}
        if len(numbers) == 2:
            shards, copies = numbers["dp_shard"], numbers["dp_replicate"]
            fixed = ParallelConfig(strategy=Strategy.fsdp2, dp_shard=shards, dp_replicate=copies)
            assert check(replace(config, parallel=fixed), world) == []


@settings(deadline=None, max_examples=200)
@given(batch=st.integers(1, 100), micro=st.integers(1, 9), ranks=st.integers(1, 8))
def test_accumulation_counts_every_rank(batch: int, micro: int, ranks: int) -> None:
    """A run on several hosts: the ranks of all of them, not of one (LOCAL_WORLD_SIZE)."""
    world = World(ranks, 1)
    config = made(world, "ddp", parallel__dp_replicate=-1, batch_sequences=batch, micro_batch=micro)
    found = {problem.key: problem.instead for problem in check(config, world)}
    if batch < ranks:
        assert found == {"batch_sequences": f"batch_sequences={ranks}"}
        return
    share = math.ceil(batch / ranks)
    assert set(found) == ({"micro_batch"} if micro > share else set())
    for number in re.findall(r"micro_batch=(\d+)", found.get("micro_batch", "")):
        assert share % int(number) == 0
    number = accumulation(config, world)
    assert (number - 1) * micro < share <= number * micro


def test_accumulation_needs_numbers() -> None:
    with pytest.raises(ValueError, match="numbers"):
        accumulation(made(micro_batch="auto"), World(1, 1))
    with pytest.raises(ValueError, match="ranks"):
        accumulation(made(), World(2, 2))


def test_eval_only_asks_only_for_what_it_uses() -> None:
    found = problems(eval_only=True, checkpoint__load="x", steps=None, batch_sequences=None)
    assert found == {}


def test_a_tokenizer_file_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    assert set(problems(tokenizer__kind="huggingface", tokenizer__file=str(file))) == {"tokenizer.file"}
    file.write_text("{}")
    assert problems(tokenizer__kind="huggingface", tokenizer__file=str(file)) == {}


def test_the_description_has_every_key() -> None:
    text = describe(made())
    assert all(re.search(rf"^ *{name.rpartition('.')[2]}:", text, re.MULTILINE) for name in leaves(made()))
