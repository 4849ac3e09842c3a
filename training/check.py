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

from models.config import Balance, Latent, ModelConfig, MoE, Parametrization, Position, QKNorm, RotaryScaling
from parallel.config import Compress, Dtype
from parallel.planning.stages import runs
from training.check_attention import attention_rules
from training.check_layout import activations_rules, batches_around, compile_rules, parallel_rules, sizes_near
from training.check_parts import built_problems, class_problems
from training.checkpoint.remote import missing_package
from training.config import (
    Best,
    Config,
    DataKind,
    Load,
    OptimizerKind,
    ScheduleKind,
    TokenizerKind,
    leaves,
    nested,
)
from training.inputs import input_problems
from training.keys import keys, nearest, show
from training.nearby import alternatives, around, counted, divisors_around, legal_numbers
from training.refusal import Problem, Refusal
from training.resolve import DEGREES, VOCABULARIES, Chosen, World, data_ranks, rank_sequences, resolve, resolve_model
from training.schedule import Schedule

# the scores of each task, and which is best
SCORES = {
    "heldout": {"loss": Best.lowest, "perplexity": Best.lowest, "bits_per_byte": Best.lowest},
    "continuation": {"accuracy": Best.highest},
}
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
        _model,
        _latent,
        _multitoken,
        attention_rules,
        _parametrization,
        _experts,
        _schedule_units,
        _checkpoint,
        _spikes,
        _evals,
        _metrics,
    ]
    rules += [] if config.eval_only else [_length, _batch, _schedule, _compression, activations_rules]
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


def _rotary(model: ModelConfig) -> Iterator[Problem]:
    """model.head_size is known."""
    rotary, turned = model.rotary, int(model.head_size * model.rotary.share)
    latent = model.latent.kv_rank > 0  # whose width has a rule of its own
    if not latent and (model.head_size * rotary.share != turned or turned % 2 != 0 or turned == 0):
        reason = (
            f"of a head of {model.head_size} an even number is turned, and that is {model.head_size * rotary.share:g}"
        )
        even = [count / model.head_size for count in range(2, model.head_size + 1, 2)]
        shares = [share for share in even if share * model.head_size % 2 == 0]
        nearest = min(shares, key=lambda share: abs(share - rotary.share), default=None)
        wider = f"model.head_dim={2 * -(-model.head_size // 2)}"
        instead = wider if rotary.share == 1 or nearest is None else f"model.rotary.share={nearest}"
        yield Problem("model.rotary.share", rotary.share, reason, instead)
    if rotary.scaling is RotaryScaling.llama3 and rotary.low_frequency >= rotary.high_frequency:
        reason = f"must be below model.rotary.high_frequency={rotary.high_frequency:g}"
        yield Problem("model.rotary.low_frequency", rotary.low_frequency, reason, "model.rotary.low_frequency=1.0")
    if rotary.scaling is RotaryScaling.yarn and rotary.beta_slow >= rotary.beta_fast:
        reason = f"must be below model.rotary.beta_fast={rotary.beta_fast:g}"
        yield Problem("model.rotary.beta_slow", rotary.beta_slow, reason, "model.rotary.beta_slow=1.0")


def _model(config: Config, world: World) -> Iterator[Problem]:
    model = config.model
    latent = model.latent.kv_rank > 0  # which has rules of its own
    if not latent and model.head_dim is None and legal_numbers(model.dim, model.heads) and model.dim % model.heads != 0:
        reason = f"must divide model.dim={model.dim}"
        dims = alternatives("model.dim", around(model.dim, model.heads))
        yield Problem(
            "model.heads",
            model.heads,
            reason,
            f"{alternatives('model.heads', divisors_around(model.dim, model.heads))}, or {dims}",
        )
    if not latent and legal_numbers(model.heads, model.kv_heads) and model.heads % model.key_value_heads != 0:
        reason = f"must divide model.heads={model.heads}"
        legal = alternatives("model.kv_heads", divisors_around(model.heads, model.key_value_heads))
        yield Problem("model.kv_heads", model.kv_heads, reason, legal)
    if model.window is None and model.window_stages > 1:
        reason = "there is no window to grow, since model.window is null"
        yield Problem("model.window_stages", model.window_stages, reason, "model.window_stages=1, or model.window=256")
    if model.position is Position.rotary and legal_numbers(model.dim, model.heads) and legal_numbers(model.head_size):
        yield from _rotary(model)
    tables = model.value_embeddings
    if not latent and legal_numbers(model.layers, tables) and 2 * tables > model.layers:
        reason = f"each table serves two blocks, and model.layers={model.layers}"
        instead = f"model.value_embeddings={model.layers // 2}, or model.layers={2 * tables}"
        yield Problem("model.value_embeddings", tables, reason, instead)
    length = config.sequence_length
    if length is not None and length > model.context:
        reason = f"is longer than model.context={model.context}, the positions the model has"
        longer = "" if model.init_from is not None else f", or model.context={length}"  # else the shape is given
        yield Problem("sequence_length", length, reason, f"sequence_length={model.context}{longer}")
    needed = VOCABULARIES.get(config.tokenizer.kind)
    if needed is not None and model.vocab_size is not None and model.vocab_size < needed:
        reason = f"the tokenizer {config.tokenizer.kind.name} has {needed} tokens"
        own = f"the tokenizer of {model.init_from}" if model.init_from is not None else "model.vocab_size=null"
        yield Problem("model.vocab_size", model.vocab_size, reason, own)


def _latent(config: Config, world: World) -> Iterator[Problem]:
    """What latent attention takes the place of, and what it needs."""
    model, latent, default = config.model, config.model.latent, Latent()
    if latent.kv_rank == 0:
        for name, value in leaves(latent).items():
            if value != leaves(default)[name]:
                reason = "there is no latent attention, and model.latent.kv_rank is 0"
                yield Problem(f"model.latent.{name}", value, reason, "model.latent.kv_rank=512, or leave it out")
        return
    if latent.kv_rank < 0:
        return
    if model.position is not Position.rotary:
        reason = "latent attention (model.latent.kv_rank) has rotary positions"
        yield Problem("model.position", model.position.name, reason, "model.position=rotary")
    if latent.rope_dim >= 1 and latent.rope_dim % 2 != 0:
        reason = "its numbers are turned in pairs"
        legal = alternatives("model.latent.rope_dim", around(latent.rope_dim, 2))
        yield Problem("model.latent.rope_dim", latent.rope_dim, reason, legal)
    if model.rotary.share != 1:
        reason = "latent attention turns all of model.latent.rope_dim"
        yield Problem("model.rotary.share", model.rotary.share, reason, "model.rotary.share=1.0")
    if legal_numbers(latent.nope_dim, latent.rope_dim, latent.value_dim) and latent.value_dim > model.head_size:
        reason = f"a head's values are at most as wide as its keys, nope_dim + rope_dim = {model.head_size}"
        yield Problem("model.latent.value_dim", latent.value_dim, reason, f"model.latent.value_dim={model.head_size}")
    others: dict[str, tuple[Any, Any, str]] = {
        "model.kv_heads": (model.kv_heads, (None, model.heads), "each head has keys of its own"),
        "model.head_dim": (model.head_dim, (None,), "widths of heads are those of model.latent"),
        "model.qk_norm": (model.qk_norm, (QKNorm.none,), "what queries and keys come from is normalized"),
        "model.value_embeddings": (model.value_embeddings, (0,), "values come from the narrow vectors alone"),
    }
    for name, (value, legal_values, reason) in others.items():
        if value not in legal_values:
            yield Problem(name, value, f"with latent attention {reason}", f"{name}={show(legal_values[0])}")


def _multitoken(config: Config, world: World) -> Iterator[Problem]:
    """What the prediction of further tokens needs."""
    model, default = config.model, ModelConfig()
    if model.mtp == 0 and model.mtp_weight != default.mtp_weight:
        reason = "is the weight of further tokens, and model.mtp is 0"
        yield Problem("model.mtp_weight", model.mtp_weight, reason, "model.mtp=1, or leave it out")
    if model.mtp < 1:
        return
    if model.mtp_weight == 0:
        instead = f"model.mtp_weight={default.mtp_weight}, or model.mtp=0"
        yield Problem("model.mtp_weight", 0.0, "leaves what model.mtp predicts without effect", instead)
    if model.position is Position.learned and model.latent.kv_rank == 0:  # else told by another rule
        reason = "a token further on has no position of its own in model.mtp, which needs positions in attention"
        yield Problem("model.position", "learned", reason, "model.position=rotary, or model.mtp=0")
    for name in ("x0", "skips"):
        if getattr(model, name):
            reason = f"what comes after the layers has none, and model.mtp is {model.mtp}"
            yield Problem(f"model.{name}", True, reason, f"model.{name}=false, or model.mtp=0")


def _parametrization(config: Config, world: World) -> Iterator[Problem]:
    model = config.model
    if model.parametrization is Parametrization.standard:
        for name, value in (("mup_base_dim", model.mup_base_dim), ("mup_base_head_dim", model.mup_base_head_dim)):
            if value is not None:
                reason = "is a key of mup, and model.parametrization is standard"
                yield Problem(f"model.{name}", value, reason, f"model.{name}=null")
        return
    if model.mup_base_dim is None and legal_numbers(model.dim):
        reason = "is the width of the model whose learning rate and init_std these are"
        yield Problem("model.mup_base_dim", None, reason, f"model.mup_base_dim={model.dim}")
    standard = "model.parametrization=standard model.mup_base_dim=null"
    if model.latent.kv_rank > 0:
        reason = "says how heads and their width scale, and model.latent.kv_rank has widths of its own"
        yield Problem("model.parametrization", "mup", reason, standard)
    elif config.optimizer.kind is not OptimizerKind.adamw and not config.eval_only:
        reason = f"scales learning rates as Adam needs it, and optimizer.kind is {config.optimizer.kind.name}"
        yield Problem("model.parametrization", "mup", reason, f"optimizer=adamw, or {standard}")


def _experts(config: Config, world: World) -> Iterator[Problem]:
    model, moe, default = config.model, config.model.moe, MoE()
    if moe.experts == 0:
        with_them = replace(config, model=replace(model, moe=replace(moe, experts=8)))
        legal = not list(_experts(with_them, world))
        for name, value in leaves(moe).items():
            if value != leaves(default)[name]:
                instead = "model.moe.experts=8, or leave it out" if legal else "leave it out"
                yield Problem(f"model.moe.{name}", value, "the model has no experts", instead)
        return
    if moe.experts < 0:
        return
    if moe.experts == 1:
        yield Problem(
            "model.moe.experts", 1, "leaves a router nothing to choose", f"model.moe.experts={max(2, moe.top_k)}, or 0"
        )
    elif moe.top_k > moe.experts:
        reason = f"a token goes to different experts, and model.moe.experts={moe.experts}"
        instead = f"model.moe.top_k={min(default.top_k, moe.experts)}, or model.moe.experts={moe.top_k}"
        yield Problem("model.moe.top_k", moe.top_k, reason, instead)
    if moe.experts > 1:
        yield from _groups(moe)
    if moe.top_k == 1 and moe.normalize:
        reason = "a single weight divided by itself is 1, and the router learns nothing"
        yield Problem("model.moe.normalize", True, reason, "model.moe.normalize=false, or model.moe.top_k=2")
    if legal_numbers(model.layers) and moe.dense_layers >= model.layers:
        reason = f"leaves none of model.layers={model.layers} with experts"
        none = f"model.moe.experts=0 model.moe.dense_layers={default.dense_layers}"
        instead = f"model.moe.dense_layers={model.layers - 1}, or {none}"
        yield Problem("model.moe.dense_layers", moe.dense_layers, reason, instead)
    if moe.balance is Balance.none and moe.balance_weight not in (0, default.balance_weight):
        reason = "is the weight of an auxiliary loss, and model.moe.balance is none"
        yield Problem(
            "model.moe.balance_weight", moe.balance_weight, reason, "model.moe.balance=sequence, or leave it out"
        )
    if moe.balance is not Balance.none and moe.balance_weight == 0:
        reason = f"is the weight of model.moe.balance={moe.balance.name}, which then does nothing"
        instead = f"model.moe.balance_weight={default.balance_weight}, or model.moe.balance=none"
        yield Problem("model.moe.balance_weight", 0.0, reason, instead)


def _groups(moe: MoE) -> Iterator[Problem]:
    """Whether groups are equal, have the two experts they are known by, and leave enough to choose from."""
    groups, top, each = moe.groups, moe.top_groups, moe.experts // max(moe.groups, 1)
    if not legal_numbers(groups, top):
        return
    if groups > 1 and (moe.experts % groups != 0 or each < 2):
        reason = f"cuts model.moe.experts={moe.experts} into groups that are not equal, or have less than 2"
        legal = max(n for n in range(1, min(groups, moe.experts // 2) + 1) if moe.experts % n == 0)
        enough = min(max(top, -(-moe.top_k * legal // moe.experts)), legal)
        instead = f"model.moe.groups={legal}" + (f" model.moe.top_groups={enough}" if enough != top else "")
        yield Problem("model.moe.groups", groups, reason, instead)
    elif top > groups:
        reason = f"a token's experts are in different groups, and model.moe.groups={groups}"
        yield Problem("model.moe.top_groups", top, reason, f"model.moe.top_groups={groups}")
    elif top * each < moe.top_k <= moe.experts:
        reason = f"leaves {top * each} experts to choose model.moe.top_k={moe.top_k} from"
        yield Problem("model.moe.top_groups", top, reason, f"model.moe.top_groups={-(-moe.top_k // each)}")


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


def _length(config: Config, world: World) -> Iterator[Problem]:
    given = {name: getattr(config, name) for name in ("steps", "tokens", "epochs") if getattr(config, name) is not None}
    if not given:
        yield Problem("steps", None, "the run has no length", "steps=1000, or tokens=... or epochs=...")
    if len(given) > 1:
        first, *others = given
        listed = " and ".join(f"{name}={value}" for name, value in given.items())
        nulls = " ".join(f"{name}=null" for name in others)
        yield Problem(
            first,
            given[first],
            f"the length is given more than once: {listed}",
            f"one of them, such as {first}={given[first]} {nulls}",
        )


def _batch(config: Config, world: World) -> Iterator[Problem]:
    batch, tokens, length, ranks = (
        config.batch_sequences,
        config.batch_tokens,
        config.sequence_length,
        data_ranks(config),
    )
    if batch is not None and tokens is not None:
        reason = f"the batch is given twice: batch_sequences={batch} and batch_tokens={tokens}"
        yield Problem(
            "batch_sequences", batch, reason, f"one of them, such as batch_sequences={batch} batch_tokens=null"
        )
    elif batch is None and tokens is None:
        yield Problem("batch_sequences", None, "the batch has no size", "batch_sequences=32, or batch_tokens=...")
    elif batch is None and tokens is not None and length is not None and legal_numbers(tokens, length):
        legal = alternatives("batch_tokens", around(tokens, length))
        yield Problem("batch_tokens", tokens, f"is not a multiple of sequence_length={length}", legal)
    micro = config.micro_batch
    if (isinstance(micro, str) and micro != "auto") or (isinstance(micro, int) and micro < 1):
        auto = "" if config.parallel.pp > 1 else " or micro_batch=auto"
        reason = "is a number of sequences of at least 1" + ("" if config.parallel.pp > 1 else ", or auto")
        yield Problem("micro_batch", micro, reason, f"micro_batch=1{auto}")
        return
    if batch is None or batch < 1 or math.prod(getattr(config.parallel, name) for name in DEGREES) != world.ranks:
        return  # what is wrong with the degrees is told by itself
    sequences = rank_sequences(batch, ranks)
    if batch < ranks:
        reason = f"leaves nothing for {counted(ranks - batch, 'rank')} of {ranks} that see different sequences"
        instead = alternatives("batch_sequences", batches_around(batch, ranks, config.parallel))
        yield Problem("batch_sequences", batch, reason, instead)
    elif isinstance(micro, int) and micro > sequences and (config.parallel.pp == 1 or runs(config.parallel, 1)):
        reason = f"is more than the {counted(sequences, 'sequence')} of a rank in a step"
        instead = alternatives("micro_batch", sizes_near(sequences, micro, config.parallel))
        yield Problem("micro_batch", micro, reason, instead)


def _schedule_units(config: Config, world: World) -> Iterator[Problem]:
    """One unit for each of warm-up and decay, and none that the schedule does not use."""
    for what in ("warmup", "decay"):
        names = [f"schedule.{what}_{unit}" for unit in ("steps", "tokens", "share")]
        given = {name: value for name, value in leaves(config).items() if name in names and value is not None}
        if len(given) > 1:
            listed = " and ".join(f"{name}={value}" for name, value in given.items())
            first = next(iter(given))
            yield Problem(first, given[first], f"is given more than once: {listed}", f"only {first}={given[first]}")
        if what == "decay" and config.schedule.kind is not ScheduleKind.warmup_stable_decay:
            for name, value in given.items():
                reason = f"is a key of warmup_stable_decay; the schedule is {config.schedule.kind.name}"
                yield Problem(name, value, reason, "schedule=warmup_stable_decay, or leave it out")


def _schedule(config: Config, world: World) -> Iterator[Problem]:
    steps, batch, length = config.steps, config.batch_sequences, config.sequence_length
    if steps is None or batch is None or length is None or not legal_numbers(steps, batch, length):
        return
    schedule = Schedule(config.schedule, config.optimizer.lr, steps, batch * length)
    decay = schedule.decay if config.schedule.kind is ScheduleKind.warmup_stable_decay else 0
    if schedule.warmup + decay > steps:
        taken = f"{schedule.warmup} steps of warm-up" + (f" and {decay} of decay" if decay else "")
        name = next(n for n in ("steps", "tokens", "share") if getattr(config.schedule, f"warmup_{n}") is not None)
        value = getattr(config.schedule, f"warmup_{name}")
        reason = f"{taken} do not fit into a run of {steps}"
        yield Problem(
            f"schedule.warmup_{name}",
            value,
            reason,
            f"schedule.warmup_{name}=null for a share of the run, or more steps",
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


def _checkpoint(config: Config, world: World) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.dir is not None and not checkpoint.dir.strip():
        yield Problem("checkpoint.dir", checkpoint.dir, "is the folder of the checkpoints", "checkpoint.dir=null")
    for name in ("dir", "mirror", "load"):
        yield from _url(f"checkpoint.{name}", getattr(checkpoint, name) or "")
    if checkpoint.mirror is not None and checkpoint.mirror in (checkpoint.dir, ""):
        reason = "is where the checkpoints are saved first"
        yield Problem("checkpoint.mirror", checkpoint.mirror, reason, "checkpoint.mirror=null, or another place")
    every, permanent = checkpoint.every, checkpoint.permanent_every
    if every >= 0 and permanent > 0 and (every == 0 or permanent % every != 0):
        if every == 0:
            reason, instead = (
                "no checkpoints are saved on the way: checkpoint.every is 0",
                f"checkpoint.every={permanent}",
            )
        else:
            reason = f"is not a multiple of checkpoint.every={every}"
            instead = alternatives("checkpoint.permanent_every", around(permanent, every))
        yield Problem("checkpoint.permanent_every", permanent, reason, instead)
    for step in checkpoint.permanent_steps:
        if step < 1:
            kept = [wanted for wanted in checkpoint.permanent_steps if wanted >= 1]
            reason, instead = "steps are counted from 1", f"checkpoint.permanent_steps=[{','.join(map(str, kept))}]"
            yield Problem("checkpoint.permanent_steps", step, reason, instead)
    yield from _keep_best(config)
    if checkpoint.load is None and checkpoint.load_parts is not Load.weights:
        yield Problem(
            "checkpoint.load_parts",
            checkpoint.load_parts.name,
            "there is nothing to load",
            "checkpoint.load=outputs/<name>",
        )
    for name in checkpoint.allow_changes:
        if name not in keys():
            near = nearest(name, keys())
            instead = f"checkpoint.allow_changes=[{near[0]}]" if near else "dotted keys, such as [steps,optimizer.lr]"
            yield Problem("checkpoint.allow_changes", name, "there is no such key", instead)


def _url(name: str, place: str) -> Iterator[Problem]:
    if why := missing_package(place):
        extra = "`uv sync --extra s3`, or " if place.startswith("s3://") else ""
        yield Problem(name, place, why, f"{extra}a path, or a URL such as s3://bucket/prefix")
    elif "://" in place and "@" in place.partition("://")[2].partition("/")[0]:
        hidden = f"{place.partition('://')[0]}://...@{place.partition('@')[2]}"
        reason = "a URL is saved with the run, and must hold no secret"
        yield Problem(name, hidden, reason, "credentials in the environment, and a URL without them")


def _keep_best(config: Config) -> Iterator[Problem]:
    """A score that no checkpoint will have keeps none."""
    wanted, best_is = config.checkpoint.keep_best, config.checkpoint.best_is
    if wanted is None:
        return
    known = {f"{task}.{metric}": best for task, metrics in SCORES.items() for metric, best in metrics.items()}
    scored = [name for name in known if name.partition(".")[0] in config.evals.tasks]
    ways = [
        f"checkpoint.keep_best={name}"
        + (f" checkpoint.best_is={known[name].name}" if known[name] is not best_is else "")
        for name in scored
    ]
    if wanted not in scored:
        reason = "no checkpoint gets this score" if wanted in known else "there is no such score"
        yield Problem("checkpoint.keep_best", wanted, reason, " or ".join(ways) or "checkpoint.keep_best=null")
    elif best_is is not known[wanted]:
        reason = f"of {wanted} the {known[wanted].name} is best"
        yield Problem("checkpoint.best_is", best_is.name, reason, f"checkpoint.best_is={known[wanted].name}")


def _spikes(config: Config, world: World) -> Iterator[Problem]:
    """Whether there is a checkpoint to go back to when a spike comes right after one."""
    spikes, every, keep = config.spikes, config.checkpoint.every, config.checkpoint.keep
    if spikes.threshold <= 0:
        return
    if config.steps is not None and spikes.window >= config.steps:
        reason = f"no step has so many before it: the run has {config.steps:,}"
        instead = "spikes.threshold=0" if config.steps == 1 else f"spikes.window={max(config.steps // 10, 1)}"
        yield Problem("spikes.window", spikes.window, reason, instead)
    if every == 0:
        reason = "there is no checkpoint to go back to: checkpoint.every is 0"
        yield Problem("spikes.threshold", spikes.threshold, reason, "checkpoint.every=500, or spikes.threshold=0")
    elif every > 0 and keep >= 0 and (least := 1 + math.ceil(spikes.before / every)) > max(keep, 1):
        reason = f"right after a checkpoint a run goes back to one {counted(spikes.before, 'step')} before it, and "
        reason += "that must still be there"
        yield Problem("checkpoint.keep", keep, reason, f"checkpoint.keep={least}, or spikes.before=0")


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
