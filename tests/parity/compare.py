"""Runs cases on the ranks with the code that train.py runs, and measures how far they are from the oracle."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel.apply import Spread, parallelize
from parallel.compile import allow_graphs
from parallel.config import Scope
from parallel.mesh import build_mesh, data_coordinate, start_process_group
from parallel.precision import settle
from tests.oracle import Batch, Trajectory
from tests.oracle_model import Shape, Weights
from tests.parity.cases import LRS, Case, Training, batches, shape_of, slices
from tests.parity.layouts import BY_INDUCTOR
from training.config import Config
from training.evals.loss import Forward
from training.evals.suite import Suite
from training.evals.task import Score
from training.evaluation import Evaluation
from training.metrics.meters import Meters, Speed
from training.optimizers.build import build_optimizer
from training.ranks import Ranks
from training.step import Step, StepResult

CPU = torch.device("cpu")
EVALUATED = (0, 3)  # steps before which the token losses are compared, in a pass as the evaluation makes it


@dataclass(frozen=True)
class Differences:
    """The largest of any step and rank. Those that promise 1 bounds are in its measure: 1 is the bound's unit."""

    initial: bool  # bitwise equal
    copies: bool  # parts that several ranks hold are bitwise equal, in every gradient, the first and the last weights
    predicted: bool  # the tokens counted
    loss: float  # relative
    norm: float  # relative
    first_gradient: float  # as `gradient`, of the first step, in which the weights are equal
    # of each gradient's difference to its own norm, or to `floor` of the global norm where its own is below
    gradient: float
    parameters: float  # largest |difference| / (rtol x |value| + atol x highest lr), with the tolerances of the dtype
    padding: float  # largest absolute value in a padded row
    token_losses: float  # relative to the largest

    def promised(self, training: Training) -> "Differences":
        """Without what promise 1 leaves out: Adam makes a full step of the rounding of a zero, so in float32 even two
        plain loops part, in weights and so in the gradients after the first step."""
        if (training.precision, training.optimizer) == ("fp32", "adamw"):
            return replace(self, gradient=self.first_gradient, parameters=0.0)
        return self

    def wrong(self, bounds: "Bounds") -> list[str]:
        """What promise 1 does not allow."""
        held = {
            "initial weights differ in some bit": self.initial,
            "ranks that hold the same part hold different bits": self.copies,
            "predicted tokens are counted wrongly": self.predicted,
            f"the loss differs by {self.loss:.1e}": self.loss <= bounds.scalar,
            f"the norm differs by {self.norm:.1e}": self.norm <= bounds.scalar,
            f"token losses differ by {self.token_losses:.1e}": self.token_losses <= bounds.scalar,
            f"a gradient differs by {self.gradient:.1e}": self.gradient <= bounds.gradient,
            f"parameters differ by {self.parameters:.1e} of the bound": self.parameters <= 1.0,
            f"a padded row has a gradient or a value of {self.padding:.1e}": self.padding == 0.0,
        }
        return [what for what, holds in held.items() if not holds]

    @staticmethod
    def worst(all_of_them: Iterable["Differences"]) -> "Differences":
        rows = list(all_of_them)
        numbers: dict[str, Any] = {
            name: largest(getattr(row, name) for row in rows)
            for name in ("loss", "norm", "first_gradient", "gradient", "parameters", "padding", "token_losses")
        }
        flags = {name: all(getattr(row, name) for row in rows) for name in ("initial", "copies", "predicted")}
        return Differences(**flags, **numbers)


@dataclass(frozen=True)
class Bounds:
    """Promise 1's, for a dtype."""

    dtype: torch.dtype
    scalar: float  # loss, norm and token losses
    gradient: float
    floor: float  # share of the global norm below which a gradient's own norm is not its measure
    rtol: float  # of parameters
    atol: float  # of parameters, times the learning rate


BOUNDS = {
    "fp64": Bounds(torch.float64, scalar=1e-9, gradient=1e-9, floor=1e-9, rtol=1e-9, atol=1e-7),
    "fp32": Bounds(torch.float32, scalar=1e-5, gradient=1e-5, floor=1e-2, rtol=1e-5, atol=1e-5),
}


Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Whole:
    """Full tensors put together from all ranks, and whether ranks that hold the same part hold the same bits."""

    values: Weights
    copies_equal: bool


class WatchedStep(Step):
    """The step, which also keeps the gradients of before clipping."""

    gradients: Whole

    def backward(self, micro_batches: list[dict[str, Any]], predicted: int) -> StepResult:
        result = super().backward(micro_batches, predicted)
        self.gradients = gather(
            {name: p.grad for name, p in self.spread.model.named_parameters() if p.grad is not None}
        )
        return result


def gather(tensors: Mapping[str, Tensor]) -> Whole:
    """A collective. In one exchange for all tensors, since there are many small ones. A stage of a pipeline has some of
    the names only."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: part(tensor.detach()) for name, tensor in tensors.items()})
    values: Weights = {}
    equal = True
    for name, shape in {name: shape for of_rank in parts for name, (shape, _, _) in of_rank.items()}.items():
        values[name] = torch.full(shape, torch.nan, dtype=next(iter(tensors.values())).dtype)
        regions: dict[Region, Tensor] = {}
        for _, region, held in (of_rank[name] for of_rank in parts if name in of_rank):
            equal &= torch.equal(regions.setdefault(region, held), held)
            values[name][tuple(slice(*ends) for ends in region)] = held
        assert sum(held.numel() for held in regions.values()) == values[name].numel()
    return Whole(values, equal)


def untwin(whole: Whole, shape: Shape) -> Whole:
    """Without the copies that later stages of a pipeline have of a shared weight, which must be equal."""
    values, equal = dict(whole.values), whole.copies_equal
    twins = {f"values.{layer}.table.weight": shape.table_of(layer) for layer in range(shape.layers)}
    pairs = {name: f"values.{number}.table.weight" for name, number in twins.items()}
    pairs["mtp.embed.tokens.weight"] = "embed.tokens.weight"
    if shape.tied:
        pairs["head.weight"] = "embed.tokens.weight"
    for second, first in pairs.items():
        if second in values and second != first:
            equal &= torch.equal(values.pop(second), values[first])
    return Whole(values, equal)


def part(tensor: Tensor) -> tuple[torch.Size, Region, Tensor]:
    """The whole shape; where the part that this rank holds begins and ends in each dimension, and the part. Shards are
    as equal as torch.chunk makes them; the axes of the mesh cut from the last to the first."""
    region = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tensor.shape, tuple(region), tensor
    for axis, kind in reversed(list(enumerate(tensor.placements))):
        assert not kind.is_partial()
        if not kind.is_replicate():
            first, last = region[kind.dim]  # type: ignore[attr-defined]
            chunks = torch.arange(first, last).chunk(tensor.device_mesh.size(axis))
            here = tensor.device_mesh.get_local_rank(axis)
            mine = chunks[here].tolist() if here < len(chunks) else []
            region[kind.dim] = (mine[0], mine[-1] + 1) if mine else (last, last)  # type: ignore[attr-defined]
    return tensor.shape, tuple(region), tensor.to_local()


def build(config: Config, mesh: DeviceMesh | None) -> tuple[Spread, WatchedStep]:
    precision = settle(config.precision, CPU)
    reduce = config.precision.reduce_dtype
    layout = (config.parallel, precision, reduce, config.compile, config.activations)
    spread = parallelize(config.model, mesh, *layout, config.seed, CPU, config.optimizer.sums)
    optimizer = build_optimizer(config.optimizer, spread.model)
    return spread, WatchedStep(spread, mesh, optimizer, config.optimizer.clip)


def mesh_of(config: Config, known: dict[tuple[int, ...], DeviceMesh]) -> DeviceMesh | None:
    """A mesh makes process groups, which add up; cases of the same degrees share one."""
    parallel = config.parallel
    degrees = parallel.pp, parallel.copies, parallel.shards, parallel.tp
    if not parallel.on_mesh:
        return None
    if degrees not in known:
        known[degrees] = build_mesh(parallel, CPU)
    return known[degrees]


def run_cases(cases: list[tuple[Case, Config]], folder: Path) -> list[Differences]:
    """On each rank: what every case differs from the oracle's trajectories in `folder`, seen from this rank."""
    group = start_process_group(CPU, timeout_seconds=60)
    try:
        found: list[Differences] = []
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for case, config in cases:
            try:
                found.append(run_case(case, config, mesh_of(config, meshes), folder, Ranks(group)))
            except Exception as error:
                error.add_note(f"in {case}")
                raise
        return found
    finally:
        dist.destroy_process_group()


def run_case(case: Case, config: Config, mesh: DeviceMesh | None, folder: Path, ranks: Ranks) -> Differences:
    oracle: Trajectory = torch.load(folder / f"{case.training}.pt", weights_only=False)
    bounds = BOUNDS[case.training.precision]
    if config.compile.scope in (Scope.auto, Scope.none):
        return compare(config, mesh, ranks, batches(), LRS, oracle, bounds)
    torch.compiler.reset()  # as each run begins: graphs of other cases count against the limit
    allow_graphs(shapes=2)  # in training and in the evaluation
    if case.layout.overrides in BY_INDUCTOR:
        return compare(config, mesh, ranks, batches(), LRS, oracle, bounds)
    with torch.compiler.set_stance(force_backend="aot_eager"):
        return compare(config, mesh, ranks, batches(), LRS, oracle, bounds)


def compare(
    config: Config,
    mesh: DeviceMesh | None,
    ranks: Ranks,
    batches: list[Batch],
    lrs: tuple[float, ...],
    oracle: Trajectory,
    bounds: Bounds,
) -> Differences:
    """One step a batch, beside the oracle's, seen from this rank."""
    spread, step = build(config, mesh)
    meters = Meters(mesh, CPU, Speed(1, ranks.size, 1.0, None), max_skipped=10)
    rank, data_ranks = data_coordinate(mesh, config.parallel.cp)
    assert isinstance(config.micro_batch, int)

    shape = shape_of(config.model)
    first = untwin(gather(dict(spread.model.named_parameters())), shape)
    initial = first.values.keys() == oracle.initial.keys()
    initial &= all(torch.equal(cut(first.values[name], value), value) for name, value in oracle.initial.items())
    padding = [largest_padding(first.values, oracle.initial)]
    token_losses, gradients, predicted, copies = [0.0], [], True, first.copies_equal
    for number, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
        mine = list(slices(batch, rank, data_ranks, config.micro_batch))
        if number in EVALUATED:
            losses, expected = evaluate(spread, mesh, ranks, mine), oracle.token_losses[number]
            expected = expected[rank * len(losses) : (rank + 1) * len(losses)]
            token_losses.append(float((losses - expected).abs().max() / expected.abs().max().clamp(min=1.0)))
        count = sum(int((micro.labels != -100).sum()) for micro in mine)
        result = step([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], count, lr)
        predicted &= int(result.predicted) == oracle.predicted[number]
        meters.add(number + 1, lr, result)
        found = untwin(step.gradients, shape)
        difference = gradient_difference(found.values, oracle.gradients[number], oracle.norms[number], bounds)
        gradients.append(difference)
        padding.append(largest_padding(found.values, oracle.initial))
        copies &= found.copies_equal
    records = meters.read(0.0)
    last = untwin(gather(dict(spread.model.named_parameters())), shape)
    padding.append(largest_padding(last.values, oracle.initial))
    return Differences(
        initial=initial,
        copies=copies and last.copies_equal,
        predicted=predicted,
        loss=largest(relative(r["loss"], loss) for r, loss in zip(records, oracle.losses, strict=True)),
        norm=largest(relative(r["grad_norm"], norm) for r, norm in zip(records, oracle.norms, strict=True)),
        first_gradient=gradients[0],
        gradient=largest(gradients),
        parameters=parameter_difference(last.values, oracle.final, bounds, max(lrs)),
        padding=largest(padding),
        token_losses=largest(token_losses),
    )


@dataclass
class Rows:
    """In the place of the suite: these micro-batches are scored, their token losses kept."""

    mine: list[Batch]
    losses: list[Tensor] = field(default_factory=list)

    def score(self, forward: Forward, *where: Any) -> list[Score]:
        with torch.no_grad():
            self.losses = [forward(micro.tokens, micro.labels) for micro in self.mine]
        return []


def evaluate(spread: Spread, mesh: DeviceMesh | None, ranks: Ranks, mine: list[Batch]) -> Tensor:
    """The token losses of this rank's sequences, by the run's own evaluation."""
    rows = Rows(mine)
    Evaluation(cast(Suite, rows), spread, mesh, ranks, CPU, lambda: None).score(0)
    return torch.cat(rows.losses)


def largest(values: Iterable[float]) -> float:
    """The maximum, and NaN if any is: Python's own can miss it."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def cut(value: Tensor, unpadded: Tensor) -> Tensor:
    return value[: unpadded.shape[0]]


def largest_padding(values: Weights, unpadded: Weights) -> float:
    rows = [values[name][value.shape[0] :].flatten() for name, value in unpadded.items() if name in values]
    return float(torch.cat(rows).abs().max()) if sum(map(len, rows)) else 0.0


def relative(value: Any, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def gradient_difference(found: Weights, expected: Weights, norm: float, bounds: Bounds) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return largest(
        float((cut(found[name], value) - value).norm()) / max(float(value.norm()), bounds.floor * norm)
        for name, value in expected.items()
    )


def parameter_difference(found: Weights, expected: Weights, bounds: Bounds, lr: float) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return largest(
        float(((cut(found[name], value) - value).abs() / (bounds.rtol * value.abs() + bounds.atol * lr)).max())
        for name, value in expected.items()
    )
