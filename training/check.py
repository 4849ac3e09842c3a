"""Whether a resolved config can run: every rule between its keys, all problems at once. No torch here."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from re import findall, fullmatch
from typing import Any

import yaml

from models.config import ModelConfig
from parallel.config import Compress, Dtype
from training.check_attention import attention_rules
from training.check_checkpoint import SCORES, checkpoint_rules
from training.check_layout import activations_rules, compile_rules, parallel_rules
from training.check_length import length_rules, unit_rules
from training.check_model import model_rules
from training.check_parts import built_problems, class_problems
from training.config import (
    Config,
    DataKind,
    TokenizerKind,
    leaves,
    nested,
)
from training.inputs import input_problems
from training.keys import keys, show
from training.nearby import counted
from training.refusal import Problem, Refusal
from training.resolve import DEGREES, Chosen, World, data_ranks, rank_sequences, resolve, resolve_model

TASKS = tuple(SCORES)
DEVICES = ("auto", "cpu", "cuda")

# Where a number must lie: keys, test, the rule in words. Null is always let through.
RANGES: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        """model.layers model.dim model.heads model.kv_heads model.head_dim model.ffn_dim model.context model.vocab_size
        model.window model.window_stages model.rotary.original_context
        model.mup_base_dim model.mup_base_head_dim
        model.vocab_multiple steps tokens sequence_length batch_sequences batch_tokens
        data.shuffle_block data.workers data.prefetch optimizer.powersgd_rank
        optimizer.max_skipped spikes.window spikes.max_rollbacks
        evals.heldout_tokens evals.continuation_items evals.batch_sequences metrics.every
        model.latent.q_rank model.latent.nope_dim model.latent.rope_dim model.latent.value_dim
        model.moe.top_k model.moe.dim model.moe.groups model.moe.top_groups
        hardware.gpus hardware.ranks_per_host parallel.stages_per_rank
        activations.segments activations.every_n""",
        lambda value: value >= 1,
        "must be at least 1",
    ),
    (
        "parallel.pp parallel.dp_replicate parallel.dp_shard parallel.cp parallel.tp",
        lambda value: value >= 1 or value == -1,
        "must be at least 1, or -1 for the rest of the ranks",
    ),
    (
        "parallel.ep",
        lambda value: value >= 1 or value == -1,
        "must be at least 1, or -1 for the most ranks that can share the experts",
    ),
    (
        """seed spikes.threshold spikes.before spikes.after
        checkpoint.every checkpoint.keep checkpoint.permanent_every
        checkpoint.ephemeral_every checkpoint.grace_seconds evals.every metrics.sample_tokens
        schedule.warmup_steps schedule.warmup_tokens schedule.decay_steps schedule.decay_tokens
        optimizer.weight_decay optimizer.powersgd_start_step model.init_std model.z_loss
        model.value_embeddings model.full_every model.init_embedding_std
        model.latent.kv_rank model.mtp model.mtp_weight
        model.moe.experts model.moe.shared model.moe.dense_layers model.moe.balance_weight model.moe.bias_rate
        model.moe.z_loss
        parallel.prefetch_forward parallel.prefetch_backward""",
        lambda value: value >= 0,
        "must not be negative",
    ),
    (
        """optimizer.lr optimizer.eps optimizer.clip epochs max_minutes checkpoint.every_minutes model.norm_eps
        model.logit_softcap
        model.attention_scale model.attention_softcap model.embedding_scale model.rotary.beta_fast
        model.rotary.beta_slow model.rotary.low_frequency model.rotary.high_frequency model.rotary.magnitude
        model.moe.scale model.moe.capacity_factor
        parallel.timeout_seconds parallel.bucket_cap_mb hardware.peak_tflops hardware.memory_gib""",
        lambda value: value > 0,
        "must be above 0",
    ),
    (
        "optimizer.beta1 optimizer.beta2 model.dropout data.heldout",
        lambda value: 0 <= value < 1,
        "must be at least 0 and below 1",
    ),
    (
        "schedule.warmup_share schedule.decay_share schedule.final_share",
        lambda value: 0 <= value <= 1,
        "must be between 0 and 1",
    ),
    ("model.rotary.theta hardware.slow_factor", lambda value: value > 1, "must be above 1"),
    ("model.rotary.factor", lambda value: value >= 1, "must be at least 1"),
    ("model.rotary.share activations.budget", lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
]


def accumulation(config: Config, world: World) -> int:
    """Micro-batches of an optimizer step on each rank, ranks of all hosts counted. Raises ValueError where the degrees
    do not use all ranks, or batch_sequences or micro_batch is no number of at least 1."""
    batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
    if math.prod(getattr(config.parallel, name) for name in DEGREES) != world.ranks:
        raise ValueError(f"the degrees of parallel do not use the {counted(world.ranks, 'rank')} there are")
    if batch is None or not isinstance(micro, int) or min(batch, micro) < 1:
        raise ValueError(f"batch_sequences={batch} and micro_batch={micro} must be numbers of at least 1")
    return rank_sequences(batch, ranks, micro) // micro


def check(config: Config, world: World) -> list[Problem]:
    """Every problem of a resolved config. Rules between numbers are looked at where the numbers themselves are legal.

    With eval_only the model and its sequence length are not known yet: call check again once the checkpoint's are."""
    model = config.model
    config = replace(config, model=replace(model, parts={}))  # the rules are those of our parts
    problems = list(_ranges(config, world))
    wrong = {problem.key for problem in problems}
    problems += [problem for problem in _between(config, world) if problem.key not in wrong]
    if model.parts:
        problems += class_problems(model)
        problems += [] if problems else built_problems(model, config.parallel)
    if config.checkpoint.export_hf and model.vocab_size is not None and not config.eval_only and not problems:
        problems += _export_problems(model)
    return [Problem(problem.key, show(problem.value), problem.reason, problem.instead) for problem in problems]


def _export_problems(model: ModelConfig) -> list[Problem]:
    from training.huggingface import export_problem  # imports torch, which takes seconds

    why = export_problem(model)
    return [Problem("checkpoint.export_hf", True, why, "checkpoint.export_hf=false")] if why else []


def _between(config: Config, world: World) -> Iterator[Problem]:
    """Those of rules between keys."""
    rules = [
        _run,
        parallel_rules,
        compile_rules,
        _precision,
        _tokenizer,
        _data,
        model_rules,
        attention_rules,
        unit_rules,
        checkpoint_rules,
        _evals,
        _metrics,
    ]
    rules += [] if config.eval_only else [length_rules, _compression, activations_rules]
    for rule in rules:
        yield from rule(config, world)


def settle(config: Config, chosen: Chosen) -> World:
    """Resolves a composed config in place and checks it. Raises Refusal with every problem."""
    world = World.of(config)
    adopted = _adopt(config, chosen)
    resolve(config, world, chosen)
    problems = adopted + check(config, world)
    wrong = {problem.key for problem in problems}
    problems += [problem for problem in input_problems(config) if problem.key not in wrong]
    if problems:
        raise Refusal(problems)
    return world


def _adopt(config: Config, chosen: Chosen) -> list[Problem]:
    """What a run takes over from model.init_from."""
    if config.model.init_from is None or config.eval_only:
        return []
    from training.huggingface import adopt_folder  # imports torch, which takes seconds

    return adopt_folder(config, chosen.given)


def describe(config: Config, chosen: Chosen | None = None) -> str:
    """The resolved config as YAML. Values that came from the environment stand as their text in the config."""
    values = leaves(config) | (chosen.unresolved if chosen else {})
    return yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True, width=120)


def _ranges(config: Config, world: World) -> Iterator[Problem]:
    values = leaves(config)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(name, value, "is not a finite number", f"{name}={keys()[name].example()}")
    for names, legal, rule in RANGES:
        for name in names.split():
            value = values[name]
            if value is not None and not legal(value):
                yield Problem(name, value, rule, f"{name}={_legal_near(name, value, legal, config, world)}")


def _legal_near(name: str, value: Any, legal: Callable[[Any], bool], config: Config, world: World) -> str:
    """The legal value to suggest: of a whole number the bound it passed (-1: the other ranks), or the least larger one
    that breaks no rule between keys; else the default."""
    default = keys()[name].default
    if not isinstance(value, int):
        return keys()[name].example()
    bound = next(bound for bound in (0, -1, 1) if legal(bound))
    if bound != 1:
        return show(bound)
    told = _breaks(config, world) - {name}
    larger = sorted({2**power * ranks for power in range(21) for ranks in (1, world.ranks)})
    fitting = (number for number in (*larger, default) if _breaks(_with(config, name, number), world) <= told)
    return show(next(fitting, bound))


def _breaks(config: Config, world: World) -> set[str]:
    """Keys that rules between keys name."""
    return {problem.key for problem in _between(config, world)}


def _with(config: Config, name: str, value: Any) -> Config:
    """The config as it would be with another value."""
    other = deepcopy(config)
    section, _, last = name.rpartition(".")
    setattr(attrgetter(section)(other) if section else other, last, value)
    if not config.eval_only:
        resolve_model(other)
    return other


def _run(config: Config, world: World) -> Iterator[Problem]:
    name = config.name or ""
    if not fullmatch(r"[\w.=,+@%-]+", name) or name in (".", ".."):
        words = findall(r"[\w-][\w.-]*", name)
        reason = "is the name of one folder: letters, digits and _ . - = , + @"
        yield Problem("name", name, reason, f"name={'-'.join(words) or 'run'}")
    if not config.out.strip():
        yield Problem("out", config.out, "is the folder of all runs", "out=outputs")
    if config.hardware.device not in DEVICES:
        reason = "is not a device; which GPUs are seen is chosen with CUDA_VISIBLE_DEVICES"
        device = "cuda" if config.hardware.device.startswith(("gpu", "cuda")) else "auto"
        yield Problem(
            "hardware.device", config.hardware.device, reason, f"hardware.device={device}, one of {' | '.join(DEVICES)}"
        )
    if not config.check_only and config.hardware.gpus not in (None, world.ranks):
        gpus = config.hardware.gpus
        start = "python train.py" if gpus == 1 else f"torchrun --nproc-per-node {gpus} train.py"
        reason = f"describes the machine for check_only, but this run was started with {counted(world.ranks, 'rank')}"
        yield Problem("hardware.gpus", gpus, reason, f"`{start} ...` to run on {gpus}, or check_only=true")
    if config.eval_only and config.checkpoint.load is None:
        yield Problem(
            "eval_only",
            True,
            "scores a checkpoint, and none is given",
            "checkpoint.load=outputs/<name>, a run's or a checkpoint's folder",
        )
    if config.eval_only and not config.evals.tasks:
        yield Problem("evals.tasks", [], "eval_only has nothing to score", f"evals.tasks=[{','.join(TASKS)}]")


def _precision(config: Config, world: World) -> Iterator[Problem]:
    precision = config.precision
    legal = (Dtype.fp32, Dtype.bf16) if precision.dtype is not Dtype.fp64 else (Dtype.fp64,)
    if precision.reduce_dtype not in legal:
        reason = f"gradients are summed in {' or '.join(d.name for d in legal)}"
        yield Problem(
            "precision.reduce_dtype", precision.reduce_dtype.name, reason, f"precision.reduce_dtype={legal[0].name}"
        )
    if precision.dtype is Dtype.tf32 and config.hardware.device == "cpu":
        yield Problem(
            "precision.dtype", "tf32", "is a format of NVIDIA GPUs, and hardware.device is cpu", "precision=fp32"
        )


def _tokenizer(config: Config, world: World) -> Iterator[Problem]:
    tokenizer = config.tokenizer
    if tokenizer.kind is TokenizerKind.tiktoken and not tokenizer.name:
        yield Problem(
            "tokenizer.name",
            tokenizer.name,
            "tokenizer=tiktoken needs the name of an encoding",
            "tokenizer.name=cl100k_base",
        )
    if tokenizer.kind is TokenizerKind.huggingface and not tokenizer.file:
        yield Problem(
            "tokenizer.file",
            tokenizer.file,
            "tokenizer=huggingface needs a file",
            "tokenizer.file=path/to/tokenizer.json",
        )
    elif tokenizer.kind is TokenizerKind.huggingface and not Path(tokenizer.file or "").is_file():
        yield Problem("tokenizer.file", tokenizer.file, "there is no such file", "the path of a tokenizer.json")
    users = {
        "name": TokenizerKind.tiktoken,
        "file": TokenizerKind.huggingface,
        "end_of_text": TokenizerKind.huggingface,
    }
    for name, user in users.items():
        if getattr(tokenizer, name) is not None and tokenizer.kind not in (user, TokenizerKind.auto):
            reason = f"is a key of {user.name}; the tokenizer is {tokenizer.kind.name}"
            yield Problem(
                f"tokenizer.{name}", getattr(tokenizer, name), reason, f"tokenizer={user.name}, or leave it out"
            )


def _data(config: Config, world: World) -> Iterator[Problem]:
    data = config.data
    if data.kind is DataKind.files and not data.files:
        yield Problem("data.files", data.files, "data=text needs files", "data.files=[path/to/*.txt]")
    if data.kind is DataKind.stdlib and data.files:
        yield Problem("data.files", data.files, "data=stdlib reads no files", "data=text")
    if data.heldout == 0 and config.evals.tasks:
        yield Problem(
            "data.heldout", 0.0, "nothing is held out for the evaluations", "data.heldout=0.05, or evals=none"
        )


def _compression(config: Config, world: World) -> Iterator[Problem]:
    """Compressed gradients need torch's DDP."""
    optimizer, parallel, kind = config.optimizer, config.parallel, config.optimizer.compression
    start, steps = optimizer.powersgd_start_step, config.steps
    late = steps is not None and start >= steps >= 1
    begins = f"optimizer.powersgd_start_step={steps // 10}" if steps is not None else ""
    of_powersgd = {f"optimizer.{name}": getattr(optimizer, name) for name in ("powersgd_rank", "powersgd_start_step")}
    set_here = [name for name, value in of_powersgd.items() if value != keys()[name].default]
    without = "".join(f" {name}={keys()[name].example()}" for name in set_here)  # beside another compression
    only_copies = parallel.tp == parallel.pp == 1
    if kind is not Compress.powersgd:
        fits = only_copies and config.model.moe.experts == 0 and not parallel.allow_mixed_devices
        use = f"parallel=ddp optimizer.compression=powersgd{f' {begins}' if late else ''}, or " if fits else ""
        for name in set_here:
            reason = f"is a key of powersgd; the compression is {kind.name}"
            yield Problem(name, of_powersgd[name], reason, f"{use}leave it out")
    if kind is not Compress.none and not parallel.torch_ddp:
        reason = "is done by torch's DDP, which serves where copies of the model are all that ranks have"
        ddp = "parallel=ddp, or " if only_copies else ""
        yield Problem("optimizer.compression", kind.name, reason, f"{ddp}optimizer.compression=none{without}")
    elif kind is not Compress.none and config.model.moe.experts > 0:
        reason = "what routers count is summed as gradients are, and must arrive as it is"
        yield Problem("optimizer.compression", kind.name, reason, f"optimizer.compression=none{without}")
    if kind is Compress.powersgd:
        if late:
            reason = f"it would not begin in a run of {counted(steps or 0, 'step')}"
            instead = f"{begins}, or optimizer.compression=none{without}"
            yield Problem("optimizer.powersgd_start_step", start, reason, instead)
        if parallel.allow_mixed_devices:
            reason = "each rank makes the sum of PowerSGD's factors, and other devices round it otherwise"
            instead = f"parallel.allow_mixed_devices=false, or optimizer.compression=bf16{without}"
            yield Problem("parallel.allow_mixed_devices", True, reason, instead)


def _evals(config: Config, world: World) -> Iterator[Problem]:
    tasks = config.evals.tasks
    for task in tasks:
        if task not in TASKS:
            near = get_close_matches(task, TASKS, n=1, cutoff=0.5)
            instead = f"evals.tasks=[{near[0] if near else ','.join(TASKS)}], or evals=none"
            yield Problem("evals.tasks", task, "there is no such task", instead)
    if len(set(tasks)) < len(tasks):
        yield Problem("evals.tasks", tasks, "a task is listed twice", f"evals.tasks=[{','.join(dict.fromkeys(tasks))}]")
    if config.evals.every > 0 and not tasks:
        yield Problem(
            "evals.every", config.evals.every, "there are no tasks to score", "evals.every=0, or evals=default"
        )


def _metrics(config: Config, world: World) -> Iterator[Problem]:
    project = config.metrics.wandb_project
    if project == "":
        yield Problem("metrics.wandb_project", "''", "is an empty name", "metrics.wandb_project=null")
    elif project is not None and find_spec("wandb") is None:
        reason = "the package wandb is not installed"
        yield Problem(
            "metrics.wandb_project", project, reason, "`uv sync --extra wandb`, or metrics.wandb_project=null"
        )
