"""Whether a resolved config can run: every rule between its keys, all problems at once. No torch here."""

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from re import findall, fullmatch
from typing import Any

import yaml

from models.config import Attention
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute, Reduce, Scope, Strategy
from parallel.planning.stages import ONE_STAGE, SPLIT, V_SHAPED, runs, stages_per_rank
from training.config import Config, DataKind, Load, ScheduleKind, TokenizerKind, leaves
from training.inputs import input_problems
from training.keys import keys, nearest, show
from training.refusal import Problem, Refusal
from training.resolve import DEGREES, VOCABULARIES, Chosen, World, data_ranks, resolve
from training.schedule import Schedule

TASKS = ("heldout", "continuation")
DEVICES = ("auto", "cpu", "cuda")

# Where a number must lie: keys, test, the rule in words. Null is always let through.
RANGES: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        """model.layers model.dim model.heads model.kv_heads model.ffn_dim model.context model.vocab_size
        model.vocab_multiple steps tokens sequence_length batch_sequences batch_tokens
        data.shuffle_block data.workers data.prefetch
        optimizer.max_skipped evals.heldout_tokens evals.continuation_items evals.batch_sequences metrics.every
        hardware.gpus hardware.ranks_per_host parallel.ep parallel.stages_per_rank
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
        """seed checkpoint.every checkpoint.keep checkpoint.permanent_every evals.every metrics.sample_tokens
        schedule.warmup_steps schedule.warmup_tokens schedule.decay_steps schedule.decay_tokens
        optimizer.weight_decay model.init_std model.z_loss parallel.prefetch_forward parallel.prefetch_backward""",
        lambda value: value >= 0,
        "must not be negative",
    ),
    (
        """optimizer.lr optimizer.eps optimizer.clip epochs max_minutes model.norm_eps model.logit_softcap
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
    ("activations.budget", lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
]
DDP_KEYS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
PP_KEYS = ("schedule", "stages_per_rank", "stage_layers")
FSDP2_KEYS = ("reshard_after_forward", "reshard_after_backward", "prefetch_forward", "prefetch_backward", "cpu_offload")


def accumulation(config: Config, world: World) -> int:
    """Micro-batches of an optimizer step on each rank, ranks of all hosts counted. Raises ValueError where the degrees
    do not use all ranks, the batch does not divide or micro_batch is no number."""
    batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
    if math.prod(getattr(config.parallel, name) for name in DEGREES) != world.ranks:
        raise ValueError(f"the degrees of parallel do not use the {_ranks(world.ranks)} there are")
    if batch is None or not isinstance(micro, int):
        raise ValueError(f"batch_sequences={batch} and micro_batch={micro} must be numbers")
    if batch < 1 or micro < 1 or ranks < 1 or batch % (micro * ranks) != 0:
        raise ValueError(f"batch_sequences={batch} is not a multiple of micro_batch={micro} x {ranks} data ranks")
    return batch // (micro * ranks)


def check(config: Config, world: World) -> list[Problem]:
    """Every problem of a resolved config. Rules between numbers are looked at where the numbers themselves are legal.

    With eval_only the model and its sequence length are not known yet: call check again once the checkpoint's are."""
    problems = list(_ranges(config))
    rules = [
        _run,
        _parallel,
        _compile,
        _precision,
        _tokenizer,
        _data,
        _model,
        _schedule_units,
        _checkpoint,
        _evals,
        _metrics,
    ]
    rules += [] if config.eval_only else [_length, _batch, _schedule, _activations]
    wrong = {problem.key for problem in problems}
    for rule in rules:
        problems += [problem for problem in rule(config, world) if problem.key not in wrong]
    return [Problem(problem.key, show(problem.value), problem.reason, problem.instead) for problem in problems]


def settle(config: Config, chosen: Chosen) -> World:
    """Resolves a composed config in place and checks it. Raises Refusal with every problem."""
    world = World.of(config)
    resolve(config, world, chosen)
    problems = check(config, world)
    wrong = {problem.key for problem in problems}
    problems += [problem for problem in input_problems(config) if problem.key not in wrong]
    if problems:
        raise Refusal(problems)
    return world


def describe(config: Config, chosen: Chosen | None = None) -> str:
    """The resolved config as YAML. Values that came from the environment stand as their text in the config."""
    values = leaves(config) | (chosen.unresolved if chosen else {})
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def _ranges(config: Config) -> Iterator[Problem]:
    values = leaves(config)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(name, value, "is not a finite number", f"{name}={keys()[name].example()}")
    for names, legal, rule in RANGES:
        for name in names.split():
            value = values[name]
            if value is not None and not legal(value):
                yield Problem(name, value, rule, f"{name}={_legal_near(value, legal, keys()[name].default)}")


def _legal_near(value: Any, legal: Callable[[Any], bool], default: Any) -> str:
    """The legal value to suggest: of a whole number the bound it passed (-1: the other ranks), else the default."""
    if isinstance(value, int):
        return show(next(bound for bound in (0, -1, 1) if legal(bound)))
    return show(default) if default is not None else "0.1"


def _around(value: int, step: int) -> list[int]:
    """The multiples of `step` nearest to a value, below and above; 0 is none."""
    return [multiple for multiple in sorted({value // step * step, -(-value // step) * step}) if multiple >= 1]


def _divisors_around(number: int, value: int) -> list[int]:
    """The divisors of a number nearest to a value, below and above."""
    divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors += [number // d for d in divisors]
    below, above = [d for d in divisors if d <= value], [d for d in divisors if d >= value]
    return sorted({*([max(below)] if below else []), *([min(above)] if above else [])})


def _written(name: str, values: list[int]) -> str:
    return " or ".join(f"{name}={value}" for value in values)


def _legal_numbers(*values: int | None) -> bool:
    """Whether all are known and at least 1, so that a rule between them can be looked at."""
    return all(value is not None and value >= 1 for value in values)


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
        reason = f"describes the machine for check_only, but this run was started with {_ranks(world.ranks)}"
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


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _parallel(config: Config, world: World) -> Iterator[Problem]:
    parallel = config.parallel
    for axis, what in (("cp", "context"), ("ep", "expert")):
        if getattr(parallel, axis) != 1:
            yield Problem(
                f"parallel.{axis}",
                getattr(parallel, axis),
                f"{what} parallelism is not in this version",
                f"parallel.{axis}=1",
            )
    yield from _strategy(parallel, world)
    yield from _tensor(config)
    yield from _pipeline(config)
    reshard, shards = parallel.reshard_after_forward, parallel.dp_shard
    whole = parallel.strategy is Strategy.fsdp2 and shards >= 1
    if whole and not isinstance(reshard, bool) and (reshard < 1 or shards % reshard != 0):
        reason = f"a number of ranks to reshard to must divide parallel.dp_shard={shards}"
        legal = _written("parallel.reshard_after_forward", _divisors_around(shards, reshard))
        yield Problem("parallel.reshard_after_forward", reshard, reason, f"{legal}, true or false")
    if parallel.strategy is Strategy.ddp and parallel.reduce is Reduce.micro_batch:
        reason = "ddp sums gradients once a step: a sum in each micro-batch would count the earlier ones again"
        yield Problem("parallel.reduce", "micro_batch", reason, "parallel.reduce=step, or parallel=fsdp2")
    if parallel.static_graph and _micro_batches(config) not in (1, None):
        reason = "torch's static graph needs the gradients to be summed in the first backward pass"
        yield Problem("parallel.static_graph", True, reason, "one micro-batch a step (a larger micro_batch), or false")
    default = ParallelConfig()
    for strategy, names in ((Strategy.ddp, DDP_KEYS), (Strategy.fsdp2, FSDP2_KEYS)):
        for name in names if parallel.strategy is not strategy else ():
            if getattr(parallel, name) != getattr(default, name):
                reason = f"is a key of {strategy.name}; the strategy is {parallel.strategy.name}"
                instead = f"parallel={strategy.name}, or leave it out"
                yield Problem(f"parallel.{name}", getattr(parallel, name), reason, instead)


def _micro_batches(config: Config) -> int | None:
    """Of a rank in a step; None while it is not known."""
    batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
    if batch is None or not isinstance(micro, int) or micro < 1 or ranks < 1:
        return None
    return batch // (micro * ranks)


def _strategy(parallel: ParallelConfig, world: World) -> Iterator[Problem]:
    """Whether the degrees use all ranks, each in a way the strategy knows."""
    degrees = {name: getattr(parallel, name) for name in DEGREES}
    if parallel.strategy is Strategy.single:
        for name in ("dp_replicate", "dp_shard"):
            if degrees[name] > 1:
                instead = "parallel=ddp" if name == "dp_replicate" else "parallel=fsdp2"
                yield Problem(f"parallel.{name}", degrees[name], "parallel=single uses one rank", instead)
        used = math.prod(degrees.values())
        if world.ranks > 1 and used == 1:
            reason = f"uses one rank, and there are {world.ranks}"
            yield Problem(
                "parallel", "single", reason, "parallel=fsdp2 or parallel=ddp, or start one rank with `python train.py`"
            )
        elif used > 1 and used != world.ranks:
            axis = "tp" if degrees["tp"] > 1 else "pp"
            instead = f"parallel.{axis}={degrees[axis] * world.ranks // used}"
            if world.ranks % used == 0:
                kept = " ".join(f"parallel.{name}={degrees[name]}" for name in ("pp", "tp") if degrees[name] > 1)
                instead += f", or parallel=fsdp2 {kept} for the others to share the model's state"
            yield Problem(f"parallel.{axis}", degrees[axis], f"uses {used} ranks, and there are {world.ranks}", instead)
        return
    if parallel.strategy is Strategy.ddp and degrees["dp_shard"] != 1:
        yield Problem(
            "parallel.dp_shard",
            degrees["dp_shard"],
            "ddp keeps the model whole on each rank",
            "parallel=fsdp2 or parallel=hsdp",
        )
        return
    illegal = any(degree < 1 and degree != -1 for degree in degrees.values()) or world.ranks < 1
    if illegal or degrees["cp"] != 1:
        return
    unknown = [axis for axis in ("pp", "tp") if degrees[axis] == -1]
    for axis in unknown:  # what is one -1 alone was filled in
        reason = f"is the rest of the {_ranks(world.ranks)}, and that is not known or no whole number"
        yield Problem(f"parallel.{axis}", -1, reason, f"parallel.{axis}=2, or another number")
    if unknown:
        return
    there = world.ranks  # for data parallelism, when the others have theirs
    for axis in ("tp", "pp"):
        if there % degrees[axis] != 0:
            reason = f"does not divide the {_ranks(there)} there are"
            legal = _written(f"parallel.{axis}", _divisors_around(there, degrees[axis]))
            yield Problem(f"parallel.{axis}", degrees[axis], reason, legal)
            return
        there //= degrees[axis]
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    if replicate * shard == there:
        return
    others = [f"{axis} {degrees[axis]}" for axis in ("pp", "tp") if degrees[axis] > 1]
    ranks = _ranks(there) + (f" (times {' x '.join(others)})" if others else "")
    if parallel.strategy is Strategy.ddp:
        reason = f"there are {ranks}, each with a copy of the model"
        yield Problem(
            "parallel.dp_replicate", replicate, reason, f"parallel.dp_replicate={there}, or -1 for all there are"
        )
        return
    name, degree = ("dp_shard", shard) if shard != -1 else ("dp_replicate", replicate)
    pairs = [(legal, there // legal) for legal in _divisors_around(there, degree)]
    if name == "dp_replicate":
        pairs = [(second, first) for first, second in pairs]
    written = " x ".join(f"{n}={d}" for n, d in (("dp_replicate", replicate), ("dp_shard", shard)) if d != -1)
    if -1 in (replicate, shard):
        reason = f"{written} does not divide the {ranks} there are"
    else:
        reason = f"{written} is {replicate * shard}, and there are {ranks}"
    choices = " or ".join(f"parallel.dp_shard={s} parallel.dp_replicate={r}" for s, r in pairs)
    yield Problem(f"parallel.{name}", degree, reason, f"{choices}; or -1 in one of them for the ranks that are left")


def _pipeline(config: Config) -> Iterator[Problem]:
    """Whether there are layers for every stage, and micro-batches as the schedule needs them."""
    parallel, layers, pp = config.parallel, config.model.layers, config.parallel.pp
    if pp == 1:
        for name in PP_KEYS:
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                yield Problem(
                    f"parallel.{name}", getattr(parallel, name), "there is one stage", "parallel.pp=2, or leave it out"
                )
        return
    if pp < 2 or layers < 1:
        return
    each, fixed = stages_per_rank(parallel), parallel.schedule in (*ONE_STAGE, *V_SHAPED)
    if parallel.stages_per_rank is not None and fixed and parallel.stages_per_rank != each:
        reason = f"a rank has {_count(each, 'stage')} in the schedule {parallel.schedule.name}"
        instead = "leave it out, or parallel.schedule=interleaved_1f1b"
        yield Problem("parallel.stages_per_rank", parallel.stages_per_rank, reason, instead)
    if layers < pp * each:
        reason = (
            f"is {_count(pp * each, 'stage')} with {each} on each rank, and the model has {_count(layers, 'layer')}"
        )
        fewer = [f"parallel.pp={layers // each}"] if layers // each > 1 else []
        fewer += ["parallel.schedule=1f1b"] if each > 1 and layers >= pp else []
        yield Problem("parallel.pp", pp, reason, " or ".join([*fewer, f"model.layers={pp * each}"]))
    elif parallel.stage_layers is not None:
        given = parallel.stage_layers
        if len(given) != pp * each or sum(given) != layers or min(given) < 1:
            reason = f"must be {_count(pp * each, 'number')} of at least 1 that add up to model.layers={layers}"
            instead = f"parallel.stage_layers=[{','.join(map(str, _evenly(layers, pp * each)))}], or null"
            yield Problem("parallel.stage_layers", given, reason, instead)
    count = _micro_batches(config)
    if config.micro_batch == "auto":
        yield Problem("micro_batch", "auto", "is not found out with a pipeline", "micro_batch=1, or another number")
    elif count is not None and count >= 1 and not runs(parallel, count):
        assert config.batch_sequences is not None and isinstance(config.micro_batch, int)
        micro, rank = config.micro_batch, config.batch_sequences // data_ranks(config)
        sizes = [size for size in range(1, rank + 1) if rank % size == 0 and runs(parallel, rank // size)]
        more = next(n for n in range(count, count + 4 * pp + 1) if runs(parallel, n) and n >= pp)
        batch = more * micro * data_ranks(config)
        reason = (
            f"leaves {_count(count, 'micro-batch')} of a step, which the schedule {parallel.schedule.name} cannot take"
        )
        near = sorted(sizes, key=lambda size: abs(size - micro))[:2]
        written = [_written("micro_batch", sorted(near))] if near else []
        yield Problem("micro_batch", micro, reason, " or ".join([*written, f"batch_sequences={batch}"]))
    if parallel.schedule in SPLIT:
        if parallel.strategy is Strategy.fsdp2 and parallel.reshard_after_forward is not False:
            reason = (
                f"{parallel.schedule.name} computes gradients in two passes, between which parameters must stay whole"
            )
            yield Problem(
                "parallel.reshard_after_forward",
                parallel.reshard_after_forward,
                reason,
                "parallel.reshard_after_forward=false",
            )
        if config.compile.scope in (Scope.block, Scope.model):
            reason = f"{parallel.schedule.name} computes gradients in two passes, which torch cannot compile"
            yield Problem("compile.scope", config.compile.scope.name, reason, "compile=none, or parallel.schedule=1f1b")
        if config.activations.mode not in (Recompute.auto, Recompute.none):
            reason = f"{parallel.schedule.name} computes gradients in two passes, and torch computes again only once"
            instead = "activations=none, or parallel.schedule=1f1b"
            yield Problem("activations.mode", config.activations.mode.name, reason, instead)
    if parallel.reduce is Reduce.micro_batch:
        reason = "a pipeline sums gradients once a step"
        yield Problem("parallel.reduce", "micro_batch", reason, "parallel.reduce=auto")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def _evenly(layers: int, stages: int) -> list[int]:
    each, more = divmod(layers, stages)
    return [each + (place < more) for place in range(stages)]


def _tensor(config: Config) -> Iterator[Problem]:
    """What tensor parallelism cuts must divide, or be enough for every rank to have some."""
    model, parallel, tp = config.model, config.parallel, config.parallel.tp
    if parallel.async_tp:
        if tp == 1:
            yield Problem("parallel.async_tp", True, "there is no tensor parallelism", "parallel.tp=2, or leave it out")
        if config.hardware.device == "cpu":
            reason = "needs a GPU's symmetric memory, and hardware.device is cpu"
            yield Problem("parallel.async_tp", True, reason, "parallel.async_tp=false")
        if config.compile.scope is Scope.none:
            reason = "is done by the compiler, and compile.scope is none"
            yield Problem("parallel.async_tp", True, reason, "compile=block, or parallel.async_tp=false")
    if tp < 2:
        return
    heads, kv_heads = model.heads, model.key_value_heads
    if _legal_numbers(heads, kv_heads) and (heads % tp != 0 or kv_heads % tp != 0):
        cut = f"model.heads={heads}" if heads == kv_heads else f"model.heads={heads} and model.kv_heads={kv_heads}"
        legal = _written("parallel.tp", _divisors_around(math.gcd(heads, kv_heads), tp))
        yield Problem("parallel.tp", tp, f"heads are shared out whole, and it does not divide {cut}", legal)
    for name, length in (("sequence_length", config.sequence_length), ("model.context", model.context)):
        if length is not None and length >= 1 and length % tp != 0:
            instead = (
                f"{_written(name, _around(length, tp))}, or {_written('parallel.tp', _divisors_around(length, tp))}"
            )
            yield Problem(name, length, f"sequences are cut into parallel.tp={tp} equal parts", instead)
    empty = f"cut over parallel.tp={tp} as torch.chunk does leaves a rank with nothing"
    if not _enough(model.feedforward_dim, tp):
        legal = _written("model.ffn_dim", _around(model.feedforward_dim, tp))
        yield Problem("model.ffn_dim", model.feedforward_dim, empty, legal)
    if _legal_numbers(model.vocab_size, model.vocab_multiple) and not _enough(model.padded_vocab_size, tp):
        reason = f"a vocabulary of {model.padded_vocab_size} rows {empty}"
        yield Problem("model.vocab_multiple", model.vocab_multiple, reason, f"model.vocab_multiple={tp}")
    if parallel.strategy is Strategy.ddp:
        for name in DDP_KEYS:
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                reason = "is a key of torch's DDP, which serves where parallel.tp is 1"
                yield Problem(f"parallel.{name}", getattr(parallel, name), reason, "leave it out")


def _enough(size: int, ranks: int) -> bool:
    """Whether every rank has some, where all but the last ones have as much as the first. Sizes below 1 are told by
    another rule."""
    return size < 1 or -(-size // ranks) * (ranks - 1) < size


def _compile(config: Config, world: World) -> Iterator[Problem]:
    compile, parallel = config.compile, config.parallel
    if compile.dynamic and compile.scope is Scope.none:
        yield Problem("compile.dynamic", True, "nothing is compiled", "compile=block, or leave it out")
    if compile.scope is Scope.model and parallel.strategy is Strategy.ddp and 0 < parallel.bucket_cap_mb < 1:
        reason = "the compiler cuts the model's graph at DDP's buckets, of which the first has 1 MB"
        yield Problem(
            "parallel.bucket_cap_mb", parallel.bucket_cap_mb, reason, "parallel.bucket_cap_mb=1, or compile=block"
        )


def _model(config: Config, world: World) -> Iterator[Problem]:
    model = config.model
    if _legal_numbers(model.dim, model.heads) and model.dim % model.heads != 0:
        reason = f"must divide model.dim={model.dim}"
        dims = _written("model.dim", _around(model.dim, model.heads))
        yield Problem(
            "model.heads",
            model.heads,
            reason,
            f"{_written('model.heads', _divisors_around(model.dim, model.heads))}, or {dims}",
        )
    if _legal_numbers(model.heads, model.kv_heads) and model.heads % model.key_value_heads != 0:
        reason = f"must divide model.heads={model.heads}"
        legal = _written("model.kv_heads", _divisors_around(model.heads, model.key_value_heads))
        yield Problem("model.kv_heads", model.kv_heads, reason, legal)
    length = config.sequence_length
    if length is not None and length > model.context:
        reason = f"is longer than model.context={model.context}, the positions the model has"
        yield Problem("sequence_length", length, reason, f"sequence_length={model.context}, or model.context={length}")
    needed = VOCABULARIES.get(config.tokenizer.kind)
    if needed is not None and model.vocab_size is not None and model.vocab_size < needed:
        reason = f"the tokenizer {config.tokenizer.kind.name} has {needed} tokens"
        yield Problem("model.vocab_size", model.vocab_size, reason, "model.vocab_size=null")
    kernel, device = model.attention, config.hardware.device
    if kernel in (Attention.efficient, Attention.cudnn) and device == "cpu":
        yield Problem("model.attention", kernel.name, "needs a GPU, and hardware.device is cpu", "model.attention=auto")
    if (
        kernel in (Attention.flash, Attention.cudnn)
        and device == "cuda"
        and config.precision.dtype in (Dtype.fp32, Dtype.tf32, Dtype.fp64)
    ):
        reason = f"computes in bf16 on a GPU, and precision.dtype is {config.precision.dtype.name}"
        yield Problem("model.attention", kernel.name, reason, "model.attention=auto, or precision=bf16")


def _activations(config: Config, world: World) -> Iterator[Problem]:
    activations, layers, default = config.activations, config.model.layers, ActivationsConfig()
    mode, segments = activations.mode, activations.segments
    for user in (Recompute.segments, Recompute.every_n, Recompute.budget):
        value = getattr(activations, user.name)
        if mode is not user and value != getattr(default, user.name):
            reason = f"is a key of activations={user.name}; the mode is {mode.name}"
            yield Problem(f"activations.{user.name}", value, reason, f"activations={user.name}, or leave it out")
    if mode is Recompute.segments and segments is not None and _legal_numbers(layers) and segments > layers:
        reason = f"a segment is one block at least, and there are {layers}"
        instead = f"activations.segments={layers}, or null for the square root of the layers"
        yield Problem("activations.segments", segments, reason, instead)
    scope = config.compile.scope
    compiled = scope in (Scope.block, Scope.model) or (scope is Scope.auto and config.hardware.device == "cuda")
    if mode is Recompute.budget and not compiled:
        only = ", which compiles on a GPU only" if scope is Scope.auto else ""
        reason = f"is torch's choice in a compiled graph, and compile.scope is {scope.name}{only}"
        yield Problem("activations.mode", "budget", reason, "compile=block or compile=model, or activations=selective")


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
    elif batch is None and tokens is not None and length is not None and _legal_numbers(tokens, length):
        legal = _written("batch_tokens", _around(tokens, length * max(ranks, 1)))
        yield Problem(
            "batch_tokens", tokens, f"is not a multiple of sequence_length={length} x {max(ranks, 1)} data ranks", legal
        )
    micro = config.micro_batch
    if (isinstance(micro, str) and micro != "auto") or (isinstance(micro, int) and micro < 1):
        yield Problem(
            "micro_batch", micro, "is a number of sequences of at least 1, or auto", "micro_batch=1 or micro_batch=auto"
        )
        return
    if batch is None or batch < 1 or math.prod(getattr(config.parallel, name) for name in DEGREES) != world.ranks:
        return  # what is wrong with the degrees is told by itself
    step = ranks * (micro if isinstance(micro, int) else 1)
    if batch % step == 0:
        return
    parts = [f"{ranks} data ranks"] + ([f"micro_batch={micro}"] if isinstance(micro, int) else [])
    instead = _written("batch_sequences", _around(batch, step))
    if batch % ranks == 0 and isinstance(micro, int):
        instead += f"; or {_written('micro_batch', _divisors_around(batch // ranks, micro))}"
    yield Problem("batch_sequences", batch, f"is not a multiple of {' x '.join(parts)}", instead)


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
    if steps is None or batch is None or length is None or not _legal_numbers(steps, batch, length):
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


def _checkpoint(config: Config, world: World) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.dir is not None and not checkpoint.dir.strip():
        yield Problem("checkpoint.dir", checkpoint.dir, "is the folder of the checkpoints", "checkpoint.dir=null")
    every, permanent = checkpoint.every, checkpoint.permanent_every
    if every >= 0 and permanent > 0 and (every == 0 or permanent % every != 0):
        if every == 0:
            reason, instead = (
                "no checkpoints are saved on the way: checkpoint.every is 0",
                f"checkpoint.every={permanent}",
            )
        else:
            reason = f"is not a multiple of checkpoint.every={every}"
            instead = _written("checkpoint.permanent_every", _around(permanent, every))
        yield Problem("checkpoint.permanent_every", permanent, reason, instead)
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
