"""Rules of the keys that say how the model is spread and computed: parallel, compile, activations. No torch here."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count
from typing import Any

from models.config import Attention
from parallel.config import (
    ActivationsConfig,
    Context,
    ParallelConfig,
    Recompute,
    Reduce,
    Scope,
    Strategy,
    experts_apart,
)
from parallel.planning.stages import ONE_STAGE, SPLIT, V_SHAPED, runs, stages_per_rank
from parallel.recomputation import settled
from training.config import Config
from training.nearby import alternatives, around, counted, divisors_around, legal_numbers
from training.refusal import Problem
from training.resolve import DEGREES, World, data_ranks, rank_sequences

AXES = ("pp", "cp", "tp")  # which leave the other ranks for data
DDP_KEYS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
PP_KEYS = ("schedule", "stages_per_rank", "stage_layers")
AGAIN = (Recompute.full, Recompute.selective, Recompute.every_n)  # blocks are computed again one by one
AUTO_WITH_STAGES = "is tried out with one micro-batch, and a pipeline holds as many at once as its schedule says"
FSDP2_KEYS = ("reshard_after_forward", "reshard_after_backward", "prefetch_forward", "prefetch_backward", "cpu_offload")


def parallel_rules(config: Config, world: World) -> Iterator[Problem]:
    parallel = config.parallel
    of_degrees = list(_strategy(config, world))
    known = not (config.eval_only and config.sequence_length is None)  # else the model is not known yet
    of_experts = list(_experts(config, world)) if known else []
    if parallel.strategy is Strategy.ddp and any(problem.key == "parallel.ep" for problem in of_experts):
        of_degrees = [problem for problem in of_degrees if problem.key != "parallel.dp_replicate"]  # mended with ep
    yield from of_degrees
    if known:
        yield from _tensor(config, world)
        yield from _context(config, world)
        yield from of_experts
        told = any(problem.key == "parallel.pp" for problem in of_degrees)
        yield from () if told else _pipeline(config, world)
    reshard, shards = parallel.reshard_after_forward, parallel.shards
    whole = parallel.strategy is Strategy.fsdp2 and shards >= 1
    if whole and not isinstance(reshard, bool) and (reshard < 1 or shards % reshard != 0):
        reason = f"a number of ranks to reshard to must divide the {shards} that share the state"
        legal = alternatives("parallel.reshard_after_forward", divisors_around(shards, reshard))
        yield Problem("parallel.reshard_after_forward", reshard, reason, f"{legal}, true or false")
    if parallel.strategy is Strategy.ddp and parallel.pp == 1 and parallel.reduce is Reduce.micro_batch:
        reason = "ddp sums gradients once a step: a sum in each micro-batch would count the earlier ones again"
        yield Problem("parallel.reduce", "micro_batch", reason, "parallel.reduce=step, or parallel=fsdp2")
    if parallel.torch_ddp and parallel.static_graph and _micro_batches(config) not in (1, None):
        reason = "torch's static graph needs the gradients to be summed in the first backward pass"
        yield Problem("parallel.static_graph", True, reason, "one micro-batch a step (a larger micro_batch), or false")
    default = ParallelConfig()
    if parallel.strategy is Strategy.ddp and not parallel.torch_ddp:
        for name in DDP_KEYS:
            if getattr(parallel, name) != getattr(default, name):
                reason = "is a key of torch's DDP, which serves where parallel.tp, pp and ep are 1"
                yield Problem(f"parallel.{name}", getattr(parallel, name), reason, "leave it out")
    for strategy, names in ((Strategy.ddp, DDP_KEYS), (Strategy.fsdp2, FSDP2_KEYS)):
        for name in names if parallel.strategy is not strategy else ():
            if getattr(parallel, name) != getattr(default, name):
                reason = f"is a key of {strategy.name}; the strategy is {parallel.strategy.name}"
                instead = f"parallel={strategy.name}, or leave it out"
                yield Problem(f"parallel.{name}", getattr(parallel, name), reason, instead)


def _micro_batches(config: Config) -> int | None:
    """Of a rank in a step; None while it is not known, and where not every rank has one."""
    batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
    if batch is None or not isinstance(micro, int) or min(micro, ranks) < 1 or batch < ranks:
        return None
    return rank_sequences(batch, ranks, micro) // micro


def _strategy(config: Config, world: World) -> Iterator[Problem]:
    """Whether the degrees use all ranks, each in a way the strategy knows."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in DEGREES}
    if parallel.strategy is Strategy.single:
        for name in ("dp_replicate", "dp_shard"):
            if degrees[name] > 1:
                instead = "parallel=ddp" if name == "dp_replicate" else "parallel=fsdp2"
                yield Problem(f"parallel.{name}", degrees[name], "parallel=single uses one rank", instead)
        if degrees["dp_replicate"] > 1 or degrees["dp_shard"] > 1:
            return
        used = math.prod(degrees.values())
        if world.ranks > 1 and used == 1:
            reason, batch = f"uses one rank, and there are {world.ranks}", _batch_with(parallel, config, world)
            spread = f"parallel=fsdp2{batch} or parallel=ddp{batch}"
            yield Problem("parallel", "single", reason, f"{spread}, or start one rank with `python train.py`")
        elif used > 1 and used != world.ranks:
            axis = "tp" if degrees["tp"] > 1 else "pp"
            are = "is" if world.ranks == 1 else "are"
            instead = _started(used, config, world) + legal_degrees(axis, config, world)
            yield Problem(
                f"parallel.{axis}", degrees[axis], f"uses {used} ranks, and there {are} {world.ranks}", instead
            )
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
    if illegal:
        return
    unknown = [axis for axis in AXES if degrees[axis] == -1]
    for axis in unknown:  # what is one -1 alone was filled in
        reason = f"is the rest of the {counted(world.ranks, 'rank')}, and that is not known or no whole number"
        two = replace(config, parallel=_with_degrees(parallel, {axis: 2}))
        yield Problem(f"parallel.{axis}", -1, reason, f"{legal_degrees(axis, two, world)}, or another number")
    if unknown:
        return
    there = world.ranks  # for data parallelism, when the others have theirs
    for axis in ("tp", "cp", "pp"):
        if there % degrees[axis] != 0:
            reason = f"does not divide the {counted(there, 'rank')} there are"
            instead = _started(math.prod(map(abs, degrees.values())), config, world)
            yield Problem(f"parallel.{axis}", degrees[axis], reason, instead + legal_degrees(axis, config, world))
            return
        there //= degrees[axis]
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    if replicate * shard == there:
        return
    others = [f"{axis} {degrees[axis]}" for axis in AXES if degrees[axis] > 1]
    ranks = counted(there, "rank") + (f" (times {' x '.join(others)})" if others else "")
    if parallel.strategy is Strategy.ddp:
        reason = f"there are {ranks}, each with a copy of the model"
        instead = f"parallel.dp_replicate={there}{_batch_with(parallel, config, world)}, or -1 for all there are"
        yield Problem("parallel.dp_replicate", replicate, reason, instead)
        return
    name, degree = ("dp_shard", shard) if shard != -1 else ("dp_replicate", replicate)
    pairs = [(legal, there // legal) for legal in divisors_around(there, degree)]
    if name == "dp_replicate":
        pairs = [(second, first) for first, second in pairs]
    cut = degrees["cp"] * degrees["tp"]  # whose ranks experts borrow too
    pairs = [(s, r) for s, r in pairs if s * cut % max(parallel.ep, 1) == 0] or [(there, 1)]
    batch = _batch_with(parallel, config, world)
    written = " x ".join(f"{n}={d}" for n, d in (("dp_replicate", replicate), ("dp_shard", shard)) if d != -1)
    if -1 in (replicate, shard):
        reason = f"{written} does not divide the {ranks} there are"
    else:
        reason = f"{written} is {replicate * shard}, and there are {ranks}"
    choices = " or ".join(f"parallel.dp_shard={s} parallel.dp_replicate={r}{batch}" for s, r in pairs)
    yield Problem(f"parallel.{name}", degree, reason, f"{choices}; or -1 in one of them for the ranks that are left")


def _started(ranks: int, config: Config, world: World) -> str:
    """How to start as many ranks, where one alone was: before other ways."""
    if world.ranks > 1 or not _is_legal(config.parallel, config, World(ranks, ranks)):
        return ""
    return (
        f"hardware.gpus={ranks} or " if config.check_only else f"`torchrun --nproc-per-node {ranks} train.py ...` or "
    )


def legal_degrees(axis: str, config: Config, world: World) -> str:
    """What to write for parallel.pp, cp or tp: the degrees nearest to the given one with which ranks, model and
    sequence can be cut, those with which the batch can stay, if any. Other axes become 1 where they have to."""
    parallel, given = config.parallel, getattr(config.parallel, axis)
    divisors = [degree for degree in range(1, world.ranks + 1) if world.ranks % degree == 0]
    others = [other for other in (*AXES, "ep") if other != axis and getattr(parallel, other) > 1]
    legal, ones = [_with_degrees(parallel, dict.fromkeys((*AXES, "ep"), 1))], tuple(others)
    for fewer in (chosen for number in range(len(others) + 1) for chosen in combinations(others, number)):
        whole = _with_degrees(parallel, dict.fromkeys(fewer, 1))
        layouts = [_with_degrees(whole, {axis: degree}) for degree in divisors]
        if fitting := [layout for layout in layouts if _is_legal(layout, config, world)]:
            legal, ones = fitting, fewer
            break
    legal = [layout for layout in legal if _batch_with(layout, config, world) == ""] or legal
    degrees = {getattr(layout, axis): layout for layout in legal}
    near = {max((d for d in degrees if d <= given), default=min(degrees)), *[d for d in degrees if d >= given][:1]}
    return " or ".join(_written(axis, ones, degrees[degree], config, world) for degree in sorted(near))


def _with_degrees(parallel: ParallelConfig, degrees: dict[str, int]) -> ParallelConfig:
    changed: dict[str, Any] = degrees
    return replace(parallel, **changed)


def _shares(parallel: ParallelConfig, world: World) -> int:
    """Ranks that pp, cp and tp leave for data, or 0 where they do not divide."""
    used = math.prod(max(getattr(parallel, axis), 1) for axis in AXES)
    return world.ranks // used if world.ranks % used == 0 else 0


def _batch_with(parallel: ParallelConfig, config: Config, world: World) -> str:
    """The batch to write beside degrees that leave other ranks for data; "" where the given one can stay."""
    batch, ranks = config.batch_sequences, _shares(parallel, world)
    if batch is None or batch < 1 or ranks < 1 or config.eval_only:
        return ""
    if batch >= ranks and takes(parallel, rank_sequences(batch, ranks)):
        return ""
    micro = config.micro_batch if isinstance(config.micro_batch, int) and config.micro_batch >= 1 else 1
    near = batches_around(batch, ranks * micro, parallel)
    return f" batch_sequences={min(near, key=lambda size: abs(size - batch))}"


def _is_legal(parallel: ParallelConfig, config: Config, world: World) -> bool:
    """Whether ranks, layers, heads, sequences and experts can be cut so, as far as their sizes are known."""
    model, ranks = config.model, _shares(parallel, world)
    if ranks == 0 or (parallel.pp > 1 and parallel.pp * stages_per_rank(parallel) > model.layers):
        return False
    heads = parallel.tp * (parallel.cp if parallel.context is Context.ulysses else 1)
    parts = [(length, parallel.sequence_cuts) for length in (config.sequence_length, model.context)]
    parts += [(model.heads, heads), (model.key_value_heads, heads)]
    parts += [(ranks * parallel.cp * parallel.tp, parallel.ep), (model.moe.experts, parallel.ep)]
    return all(size is None or size < 1 or number < 1 or size % number == 0 for size, number in parts)


def _written(axis: str, ones: Sequence[str], layout: ParallelConfig, config: Config, world: World) -> str:
    """A degree to write, and other axes that become 1; ranks that are left need a strategy that has something for them
    to do, beside which the other axes stay."""
    parallel = config.parallel
    spread = -1 in (parallel.dp_replicate, parallel.dp_shard) or parallel.dp_replicate * parallel.dp_shard > 1
    if parallel.strategy is Strategy.fsdp2 and axis != "cp":
        spread = True
    words = [f"parallel.{axis}={getattr(layout, axis)}", *(f"parallel.{other}=1" for other in ones)]
    written = " ".join(words) + _batch_with(layout, config, world)
    if spread or _shares(layout, world) == 1:
        return written
    stay = [other for other in AXES if other not in (axis, *ones) and getattr(parallel, other) > 1]
    return " ".join(["parallel=fsdp2", *(f"parallel.{other}={getattr(parallel, other)}" for other in stay), written])


def takes(parallel: ParallelConfig, micro_batches: int) -> bool:
    """Whether a pipeline's schedule can take so many micro-batches, and each rank has work."""
    return parallel.pp < 2 or (micro_batches >= parallel.pp and runs(parallel, micro_batches))


def batches_around(batch: int, step: int, parallel: ParallelConfig) -> list[int]:
    """The multiples of `step`, a micro-batch of each data rank, nearest to a batch, below and above, that the schedule
    of a pipeline takes."""
    below = next((n for n in range(batch // step, 0, -1) if takes(parallel, n)), None)
    above = next(n for n in count(max(-(-batch // step), 1)) if takes(parallel, n))
    return sorted({number * step for number in (below, above) if number is not None})


def sizes_near(sequences: int, micro: int, parallel: ParallelConfig) -> list[int]:
    """Sizes of micro-batches nearest to a given one that divide a rank's sequences, into as many as the schedule of a
    pipeline takes."""
    divisors = [size for size in range(1, sequences + 1) if sequences % size == 0]
    fitting = [size for size in divisors if takes(parallel, sequences // size)]
    return sorted(sorted(fitting, key=lambda size: abs(size - micro))[:2])


def _pipeline(config: Config, world: World) -> Iterator[Problem]:
    """Whether there are layers for every stage, and micro-batches as the schedule needs them."""
    parallel, layers, pp = config.parallel, config.model.layers, config.parallel.pp
    if pp == 1:
        for name in PP_KEYS:
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                instead = "leave it out" if world.ranks == 1 else "parallel.pp=2, or leave it out"
                yield Problem(f"parallel.{name}", getattr(parallel, name), "there is one stage", instead)
        return
    if pp < 2 or layers < 1:
        return
    each, fixed = stages_per_rank(parallel), parallel.schedule in (*ONE_STAGE, *V_SHAPED)
    if parallel.stages_per_rank is not None and fixed and parallel.stages_per_rank != each:
        reason = f"a rank has {counted(each, 'stage')} in the schedule {parallel.schedule.name}"
        instead = "leave it out, or parallel.schedule=interleaved_1f1b"
        yield Problem("parallel.stages_per_rank", parallel.stages_per_rank, reason, instead)
    elif parallel.stages_per_rank == 1 and not fixed:
        reason = f"a rank has at least 2 stages in the schedule {parallel.schedule.name}"
        instead = "parallel.stages_per_rank=2, or parallel.schedule=1f1b"
        yield Problem("parallel.stages_per_rank", 1, reason, instead)
        return
    if layers < pp * each:
        reason = (
            f"is {counted(pp * each, 'stage')} with {each} on each rank, and the model has {counted(layers, 'layer')}"
        )
        ways = [legal_degrees("pp", config, world)] if layers // each > 1 or config.eval_only else []
        ways += ["parallel.schedule=1f1b"] if each > 1 and layers >= pp else []
        ways += [] if config.eval_only else [f"model.layers={pp * each}"]  # the checkpoint's model is as it is
        yield Problem("parallel.pp", pp, reason, " or ".join(ways))
    elif parallel.stage_layers is not None:
        given = parallel.stage_layers
        if len(given) != pp * each or sum(given) != layers or min(given) < 1:
            reason = f"must be {counted(pp * each, 'number')} of at least 1 that add up to model.layers={layers}"
            instead = f"parallel.stage_layers=[{','.join(map(str, _evenly(layers, pp * each)))}], or null"
            yield Problem("parallel.stage_layers", given, reason, instead)
    if not config.eval_only:
        yield from _scheduled(config)


def _scheduled(config: Config) -> Iterator[Problem]:
    """What a schedule needs of a step."""
    parallel, number = config.parallel, _micro_batches(config)
    if config.micro_batch == "auto":
        yield Problem("micro_batch", "auto", AUTO_WITH_STAGES, "micro_batch=1, or another number")
    elif number is not None and number >= 1 and not runs(parallel, number):
        assert config.batch_sequences is not None and isinstance(config.micro_batch, int)
        batch, micro, ranks = config.batch_sequences, config.micro_batch, data_ranks(config)
        schedule = parallel.schedule.name
        reason = f"leaves {counted(number, 'micro-batch')} of a step, which the schedule {schedule} cannot take"
        sizes = alternatives("micro_batch", sizes_near(rank_sequences(batch, ranks), micro, parallel))
        batches = alternatives("batch_sequences", batches_around(batch, ranks * micro, parallel))
        yield Problem("micro_batch", micro, reason, " or ".join(filter(None, [sizes, batches])))
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


def _evenly(layers: int, stages: int) -> list[int]:
    each, more = divmod(layers, stages)
    return [each + (place < more) for place in range(stages)]


def _tensor(config: Config, world: World) -> Iterator[Problem]:
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
    if legal_numbers(heads, kv_heads) and (heads % tp != 0 or kv_heads % tp != 0):
        cut = f"model.heads={heads}" if heads == kv_heads else f"model.heads={heads} and model.kv_heads={kv_heads}"
        reason = f"heads are shared out whole, and it does not divide {cut}"
        yield Problem("parallel.tp", tp, reason, legal_degrees("tp", config, world))
    if parallel.cp == 1:
        yield from _lengths("tp", f"parallel.tp={tp} equal parts", config, world)
    empty = f"cut over parallel.tp={tp} as torch.chunk does leaves a rank with nothing"
    if not _enough(model.feedforward_dim, tp):
        legal = alternatives("model.ffn_dim", around(model.feedforward_dim, tp))
        yield Problem("model.ffn_dim", model.feedforward_dim, empty, legal)
    moe = model.moe
    if legal_numbers(moe.experts, moe.shared) and not _enough(moe.shared * model.expert_dim, tp):
        legal = alternatives("model.moe.dim", around(model.expert_dim, tp))
        reason = f"times model.moe.shared={moe.shared} {empty}"
        yield Problem("model.moe.dim", model.expert_dim, reason, legal)
    if legal_numbers(model.vocab_size, model.vocab_multiple) and not _enough(model.padded_vocab_size, tp):
        reason = f"a vocabulary of {model.padded_vocab_size} rows {empty}"
        yield Problem("model.vocab_multiple", model.vocab_multiple, reason, f"model.vocab_multiple={tp}")


def _lengths(axis: str, parts: str, config: Config, world: World) -> Iterator[Problem]:
    """Whether sequences, and the longest that is ever written, can be cut over ranks."""
    model, parallel, cuts = config.model, config.parallel, config.parallel.sequence_cuts
    lengths = {"sequence_length": config.sequence_length, "model.context": model.context}
    wrong = {name: size for name, size in lengths.items() if size is not None and size >= 1 and size % cuts != 0}
    if not wrong:
        return
    heads_divide = all(heads % parallel.tp == 0 for heads in (model.heads, model.key_value_heads))
    instead = legal_degrees(axis if heads_divide else "tp", config, world)
    if heads_divide and world.ranks % getattr(parallel, axis) == 0:
        instead = f"{_legal_lengths(wrong, cuts, config)}, or {instead}"
    for name, length in wrong.items():
        yield Problem(name, length, f"sequences are cut into {parts}", instead)


def _legal_lengths(wrong: Collection[str], cuts: int, config: Config) -> str:
    """Multiples of `cuts` nearest to the lengths that are none; no sequence is longer than the model's context."""
    length, context = config.sequence_length, config.model.context
    if length is None or "sequence_length" not in wrong:
        return alternatives("model.context", around(context, cuts))
    near = around(length, cuts)
    if "model.context" in wrong:
        longest = [max(size, context // cuts * cuts) for size in near]
        return " or ".join(f"sequence_length={s} model.context={c}" for s, c in zip(near, longest, strict=True))
    return alternatives("sequence_length", [size for size in near if size <= context] or [context])


def _context(config: Config, world: World) -> Iterator[Problem]:
    """What ranks that share sequences need of lengths, heads and kernels."""
    model, parallel, cp, tp = config.model, config.parallel, config.parallel.cp, config.parallel.tp
    kind = parallel.context
    if cp == 1 and kind is not ParallelConfig().context:
        yield Problem("parallel.context", kind.name, "no ranks share sequences", "parallel.cp=2, or leave it out")
    if cp < 2 or tp < 1:
        return
    of_tp = f", each into parallel.tp={tp}" if tp > 1 else ""
    yield from _lengths("cp", f"2 x parallel.cp={cp} equal parts{of_tp}", config, world)
    heads, kv_heads = model.heads, model.key_value_heads
    numbers = legal_numbers(heads, kv_heads) and heads % tp == kv_heads % tp == 0
    if kind is Context.ulysses and numbers and (heads % (cp * tp) != 0 or kv_heads % (cp * tp) != 0):
        cut = f"model.heads={heads}" if heads == kv_heads else f"model.heads={heads} and model.kv_heads={kv_heads}"
        shared = f"parallel.cp={cp}" + (f" x parallel.tp={tp}" if tp > 1 else "")
        reason = f"shares out whole heads, and {shared} does not divide {cut}"
        yield Problem("parallel.context", kind.name, reason, "parallel.context=gather or parallel.context=ring")
    if kind is Context.ring and model.dropout > 0:
        reason = f"merges what kernels give, which have no dropout here, and model.dropout is {model.dropout}"
        yield Problem("parallel.context", kind.name, reason, "parallel.context=gather, or model.dropout=0")
    if kind is Context.ring and model.attention_softcap is not None:
        reason = f"has a kernel of its own, and model.attention_softcap is {model.attention_softcap}"
        yield Problem("parallel.context", kind.name, reason, "parallel.context=gather or parallel.context=ulysses")
    if kind is Context.ring and model.attention not in (Attention.auto, Attention.sdpa, Attention.flash):
        reason = f"has a kernel of its own, and model.attention is {model.attention.name}"
        yield Problem("parallel.context", kind.name, reason, "parallel.context=gather, or model.attention=auto")


def _experts(config: Config, world: World) -> Iterator[Problem]:
    """What ranks with different experts need."""
    model, parallel, ep = config.model, config.parallel, config.parallel.ep
    scope, experts = config.compile.scope, model.moe.experts
    if scope is Scope.model and experts_apart(model, parallel):
        reason = "experts apart from their layer take any number of tokens, for which no graph of the model is made"
        yield Problem("compile.scope", "model", reason, "compile=block, or parallel.ep=1 parallel.tp=1")
    if ep < 2 or experts < 0:
        return
    if experts == 0:
        more = f", or model.moe.experts={4 * ep}" if parallel.shards * parallel.tp % ep == 0 else ""
        yield Problem("parallel.ep", ep, "the model has no experts", f"parallel.ep=1{more}")
        return
    degrees = parallel.dp_shard, parallel.cp, parallel.tp
    ranks = math.prod(degrees)
    if min(degrees) < 1 or _shares(parallel, world) == 0 or (experts % ep == 0 and ranks % ep == 0):
        return
    there = world.ranks // max(parallel.pp, 1) if parallel.strategy is Strategy.ddp else ranks
    legal = [f"parallel.ep={degree}" for degree in divisors_around(math.gcd(experts, there), ep)]
    if parallel.strategy is Strategy.ddp and there > 1:  # its copies lend no ranks
        stay = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1]
        batch = _batch_with(parallel, config, world)
        legal = [" ".join(["parallel=fsdp2", *stay, way]) + batch for way in legal]
    shared = f"the ranks that share a copy, dp_shard x cp x tp = {ranks}"
    yield Problem("parallel.ep", ep, f"must divide model.moe.experts={experts} and {shared}", " or ".join(legal))


def _enough(size: int, ranks: int) -> bool:
    """Whether every rank has some, where all but the last ones have as much as the first. Sizes below 1 are told by
    another rule."""
    return size < 1 or -(-size // ranks) * (ranks - 1) < size


def compile_rules(config: Config, world: World) -> Iterator[Problem]:
    compile, parallel = config.compile, config.parallel
    if compile.dynamic and compile.scope is Scope.none:
        yield Problem("compile.dynamic", True, "nothing is compiled", "compile=block, or leave it out")
    if compile.scope is Scope.model and parallel.strategy is Strategy.ddp and 0 < parallel.bucket_cap_mb < 1:
        reason = "the compiler cuts the model's graph at DDP's buckets, of which the first has 1 MB"
        yield Problem(
            "parallel.bucket_cap_mb", parallel.bucket_cap_mb, reason, "parallel.bucket_cap_mb=1, or compile=block"
        )


def compiled_rules(config: Config) -> Iterator[Problem]:
    """Of a model that is compiled: asked for, or chosen for a GPU when the device is known."""
    tp, dropout, mode = config.parallel.tp, config.model.dropout, config.activations.mode
    if tp < 2 or (mode is Recompute.auto and config.model.vocab_size is None):
        return
    mode = settled(config.activations, config.model)
    if mode is Recompute.budget:
        reason = f"torch cannot weigh what to keep in a graph that is cut over parallel.tp={tp}"
        yield Problem("activations.mode", "budget", reason, "activations=selective, or parallel.tp=1")
    if mode in AGAIN and dropout > 0:
        reason = f"torch cannot compute dropout again in a compiled graph that is cut over parallel.tp={tp}"
        instead = "activations=none, activations=segments, compile=none or model.dropout=0"
        yield Problem("activations.mode", config.activations.mode.name, reason, instead)


def activations_rules(config: Config, world: World) -> Iterator[Problem]:
    activations, layers, default = config.activations, config.model.layers, ActivationsConfig()
    mode, segments, every = activations.mode, activations.segments, activations.every_n
    for user in (Recompute.segments, Recompute.every_n, Recompute.budget):
        value = getattr(activations, user.name)
        if mode is not user and value != getattr(default, user.name):
            reason = f"is a key of activations={user.name}; the mode is {mode.name}"
            yield Problem(f"activations.{user.name}", value, reason, f"activations={user.name}, or leave it out")
    if mode is Recompute.segments and segments is not None and legal_numbers(layers) and segments > layers:
        reason = f"a segment is one block at least, and there are {layers}"
        instead = f"activations.segments={layers}, or null for the square root of the layers"
        yield Problem("activations.segments", segments, reason, instead)
    if mode is Recompute.every_n and legal_numbers(layers) and every > max(layers, default.every_n):
        reason = f"only the first of {counted(layers, 'block')} would be computed again"
        yield Problem("activations.every_n", every, reason, f"activations.every_n={layers}")
    if mode is Recompute.budget and activations.budget < 1 and config.model.dropout > 0:
        reason = "torch would draw another mask where it computes dropout again, which gives wrong gradients"
        yield Problem("activations.mode", "budget", reason, "activations=selective, or model.dropout=0")
    scope = config.compile.scope
    if scope in (Scope.block, Scope.model):
        yield from compiled_rules(config)
    compiled = scope in (Scope.block, Scope.model) or (scope is Scope.auto and config.hardware.device == "cuda")
    if mode is Recompute.budget and not compiled:
        only = ", which compiles on a GPU only" if scope is Scope.auto else ""
        reason = f"is torch's choice in a compiled graph, and compile.scope is {scope.name}{only}"
        yield Problem("activations.mode", "budget", reason, "compile=block or compile=model, or activations=selective")
