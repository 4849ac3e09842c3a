"""How layers are cut into the stages of a pipeline, and what each rank holds and does of them. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.config import ModelConfig
from models.flops import block_flops_per_token, end_flops_per_token
from models.shapes import Shapes, parameter_shapes
from parallel.config import ActivationsConfig, ParallelConfig, Recompute, Schedule

V_SHAPED = (Schedule["zbv"], Schedule["dualpipev"])
ONE_STAGE = (Schedule["gpipe"], Schedule["1f1b"])
ROUNDS = 8  # of micro-batches, a pipeline's filling and emptying and some more


# Those that compute the gradients of weights apart from those of inputs.
SPLIT = (Schedule["interleaved_zero_bubble"], *V_SHAPED)


@dataclass(frozen=True)
class Stage:
    """layers: of the whole model; first: it has the embedding; last: norm and head; rank: its place along pp."""

    index: int
    layers: range
    first: bool
    last: bool
    rank: int

    def holds(self, name: str) -> bool:
        """Whether it has the parameter of this name."""
        part, place, *_ = name.split(".")
        if part in ("blocks", "values"):
            return int(place) in self.layers
        return self.first if part == "embed" else self.last


Order = list[tuple[str, int]]  # kinds and stages of passes: F forward, B backward, or its parts I (inputs), W (weights)


def stages_per_rank(parallel: ParallelConfig) -> int:
    if parallel.schedule in ONE_STAGE:
        return 1
    return 2 if parallel.stages_per_rank is None or parallel.schedule in V_SHAPED else parallel.stages_per_rank


def stages(model: ModelConfig, parallel: ParallelConfig) -> list[Stage]:
    """Every stage of the pipeline, in the order of the layers. Raises ValueError where there are fewer layers than
    stages, or those given by hand do not add up."""
    if parallel.pp == 1:
        return [Stage(0, range(model.layers), True, True, 0)]
    number = parallel.pp * stages_per_rank(parallel)
    counts = parallel.stage_layers or balanced(model, parallel)
    if len(counts) != number or sum(counts) != model.layers or min(counts) < 1:
        raise ValueError(f"{counts} are not the layers of {number} stages of a model with {model.layers}")
    found, start = [], 0
    for index, count in enumerate(counts):
        layers = range(start, start + count)
        found.append(Stage(index, layers, index == 0, index == number - 1, rank_of(index, number, parallel)))
        start += count
    return found


def stage_with(name: str, cut: list[Stage]) -> Stage:
    """The one that has the parameter of this name."""
    return next(stage for stage in cut if stage.holds(name))


def held_stages(model: ModelConfig, parallel: ParallelConfig, rank: int) -> list[Stage]:
    """Those of a rank along pp; without a pipeline one with everything."""
    return [stage for stage in stages(model, parallel) if stage.rank == rank]


def blocks_of(model: ModelConfig, stage: Stage) -> range:
    """Its layers, and on the last stage the blocks that predict further tokens."""
    return range(stage.layers.start, stage.layers.stop + (model.mtp if stage.last else 0))


def unsplit(model: ModelConfig, parallel: ParallelConfig) -> int | None:
    """The stage whose backward pass stays in one part whatever the schedule: the last, where a weight is used once more
    behind a block that its first use leads to (the embedding by the second of two further tokens; a head that is the
    embedding by the first). torch's stage_backward_weight goes from the later use to the earlier one through that block
    and frees what the gradients of its weights need; seen on 2.11 and 2.15."""
    nested = model.mtp > 1 or (model.mtp == 1 and model.tied_head)
    return len(stages(model, parallel)) - 1 if nested else None


def stage_shapes(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> Shapes:
    """The parameters of a stage. What has two names is two parameters in a pipeline."""
    shapes = parameter_shapes(model)
    if parallel.pp > 1:
        shapes |= {second: shapes[first] for second, first in model.shared_parameters.items()}
    return {name: shape for name, shape in shapes.items() if stage.holds(name)}


def order_of(parallel: ParallelConfig, micro_batches: int, rank: int, whole: int | None = None) -> Order:
    """The passes of a rank in a step. whole: the stage that is `unsplit`. With a pipeline this imports torch, which has
    the schedules."""
    if parallel.pp == 1:
        return [("F", 0), ("B", 0)] * micro_batches
    from parallel.bubble import orders

    return [(one.kind, one.stage) for turn in orders(parallel, micro_batches, whole)[rank] for one in turn]


def extrapolated(of: Callable[[int], float], parallel: ParallelConfig, micro_batches: int) -> float:
    """What a step of so many micro-batches lasts, keeps or moves, from two steps of fewer where they are many: in its
    middle a pipeline does the same in each round, and a round more adds as much as the one before."""
    rounds = micro_batches // parallel.pp
    more = rounds - ROUNDS
    if parallel.pp == 1 or more < 1:
        return of(micro_batches)
    of_round = micro_batches // rounds
    most = micro_batches - more * of_round
    last = of(most)
    return last + more * (last - of(most - of_round))


def as_scheduled(activations: ActivationsConfig, parallel: ParallelConfig) -> ActivationsConfig:
    """What a pipeline's schedule can keep: a backward pass in two parts computes nothing again."""
    split = parallel.pp > 1 and parallel.schedule in SPLIT
    return replace(activations, mode=Recompute.none) if split else activations


def rank_of(index: int, number: int, parallel: ParallelConfig) -> int:
    """In a loop: stage i on rank i mod pp; V-shaped: there and back."""
    if parallel.schedule in V_SHAPED:
        return min(index, number - 1 - index)
    return index % parallel.pp


def balanced(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Layers of each stage such that the costliest rank is as cheap as can be, and then the costliest stage of each
    rank; in FLOPs at the full context and with what comes after the last layer, each block counted as the last. Raises
    ValueError for fewer layers than stages."""
    each = stages_per_rank(parallel)
    number = parallel.pp * each
    if model.layers < number:
        raise ValueError(f"{model.layers} layers are fewer than {number} stages")
    extra = end_flops_per_token(model, model.context) / _block_cost(model, model.layers - 1)
    last = rank_of(number - 1, number, parallel)
    ranks = [rank for rank in range(parallel.pp) if rank != last] + [last]
    counts = [0] * number
    for rank, layers in zip(ranks, _shared_out(model.layers, parallel.pp, each, extra), strict=True):
        held = [index for index in range(number) if rank_of(index, number, parallel) == rank]
        for index, count in zip(held, _shared_out(layers, each, 1, extra if rank == last else 0.0), strict=True):
            counts[index] = count
    return counts


def _shared_out(layers: int, parts: int, least: int, extra: float) -> list[int]:
    """Layers of each part, `least` or more, such that the costliest is as cheap as can be. extra: what the last part
    has beside its layers, in layers; among equals it has the most."""
    if parts == 1:
        return [layers]

    def costliest(last: int) -> float:
        return max(-(-(layers - last) // (parts - 1)), last + extra)

    last = min(range(least, layers - least * (parts - 1) + 1), key=lambda last: (costliest(last), -last))
    each, more = divmod(layers - last, parts - 1)
    return [each + 1] * more + [each] * (parts - 1 - more) + [last]


def costs(model: ModelConfig, cut: list[Stage]) -> dict[int, float]:
    """FLOPs of a token in each stage, embedding counted as nothing."""
    end = end_flops_per_token(model, model.context)
    blocks = {stage.index: sum(_block_cost(model, layer) for layer in stage.layers) for stage in cut}
    return {stage.index: blocks[stage.index] + (end if stage.last else 0.0) for stage in cut}


def _block_cost(model: ModelConfig, layer: int) -> float:
    return sum(block_flops_per_token(model, model.context, layer)[:2])


def runs(parallel: ParallelConfig, micro_batches: int) -> bool:
    """Whether the schedule can take so many micro-batches of a step; the rules are torch's."""
    if parallel.schedule is Schedule["1f1b"]:
        return micro_batches >= parallel.pp
    if parallel.schedule is Schedule["dualpipev"]:
        return micro_batches >= 2 * parallel.pp
    if parallel.schedule in (Schedule["interleaved_1f1b"], Schedule["interleaved_zero_bubble"]):
        return micro_batches % max(1, micro_batches // parallel.pp) == 0  # in rounds of equally many
    return True
