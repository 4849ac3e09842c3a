"""Promise 1: the layout never changes the run. Every layout against a plain loop in one process."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from parallel.planning.stages import V_SHAPED
from tests.oracle import train
from tests.parity.cases import LEAST_MARGIN, SEED, Case, Training, batches, config_of, recipe_of, shape_of
from tests.parity.compare import BOUNDS, Differences, run_cases
from tests.parity.layouts import (
    ACTIVATIONS,
    COMPILED,
    COMPILED_CONTEXT,
    COMPILED_EXPERT_PARALLEL,
    COMPILED_TENSOR,
    CONTEXT,
    CONTEXT_ACTIVATIONS,
    EXPERT_PARALLEL,
    EXPERT_PARALLEL_PIPELINE,
    EXPERTS,
    EXPERTS_PIPELINE,
    MAIN,
    MORE_EXPERTS,
    OF_A_FAMILY,
    OF_EACH_FAMILY,
    OPTIONS,
    PIPELINE,
    PIPELINE_MODES,
    STATIC_GRAPH,
    STREAMED,
    STREAMED_TENSOR,
    TENSOR,
    TENSOR_ACTIVATIONS,
    Layout,
)
from tests.parity.table import entry
from tests.ranks import RanksFailed, run_ranks

# Each layout and accumulation with both optimizers and both models, not with each pair of them.
FLOAT64 = {
    1: [Training("tied", "sgd", "fp64"), Training("tied", "adamw", "fp64")],
    3: [Training("untied", "adamw", "fp64"), Training("untied", "sgd", "fp64")],
}
FLOAT32 = [Training("tied", "sgd", "fp32"), Training("untied", "adamw", "fp32")]

# The same for tensor parallelism, with the models whose heads it can share out.
TENSOR_FLOAT64 = {
    1: [Training("tied for tp", "sgd", "fp64"), Training("grouped heads", "adamw", "fp64")],
    3: [Training("untied for tp", "adamw", "fp64"), Training("three matrices", "sgd", "fp64")],
}

# Models whose blocks mix in what earlier ones gave.
STREAMS = Training("streams", "adamw", "fp64")
TENSOR_STREAMS = Training("streams for tp", "adamw", "fp64")

CONTEXT_TRAININGS = [
    Training("grouped heads", "sgd", "fp64"),
    Training("streams for tp", "adamw", "fp64"),
]
CONTEXT_FLOAT32 = Training("untied for tp", "sgd", "fp32")
EXPERT_TRAININGS = {
    3: [Training("experts by the step before", "sgd", "fp64"), Training("experts", "adamw", "fp64")],
    1: [Training("experts", "sgd", "fp64"), Training("experts by the step before", "adamw", "fp64")],
}

EXPERT_PARALLEL_TRAININGS = [
    Training("experts for ep", "sgd", "fp64"),
    Training("experts for ep by the step before", "adamw", "fp64"),
]
PIPELINE_TRAININGS = [
    Training("streams for pp", "sgd", "fp64"),
    Training("untied for pp", "adamw", "fp64"),
    Training("tied for pp", "sgd", "fp32"),
]


def gloo_cannot(layout: Layout) -> pytest.MarkDecorator:
    """On the oldest torch."""
    v_shaped = any(f"schedule={schedule.name}" in layout.overrides for schedule in V_SHAPED)
    old = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    return pytest.mark.skipif(old and v_shaped, reason="torch 2.11 cannot run it over gloo")


# Whose matrices begin smaller and learn more slowly than the rest.
MUP = [
    Case(TENSOR[0], 1, Training("mup", "adamw", "fp64")),
    Case(MAIN[0], 3, Training("mup", "adamw", "fp64")),
    Case(EXPERT_PARALLEL[0], 1, Training("mup with experts", "adamw", "fp64")),
    Case(PIPELINE[0][0], PIPELINE[0][1], Training("mup for pp", "adamw", "fp64")),
]

# Experts that do not divide the tokens of a micro-batch.
IN_TURN = [
    Case(of, accumulation, Training("experts in turn", "sgd", "fp64"))
    for of in (EXPERT_PARALLEL[0], EXPERT_PARALLEL[6], EXPERT_PARALLEL[9])
    for accumulation in (1, 3)
]


# Of the layouts on 8 ranks, and of the schedules on 4, those that are tried in every test run.
QUICK_ON_8 = ("parallel=3d", "parallel=fsdp2 parallel.tp=2 parallel.cp=2 parallel.ep=2")
QUICK_ON_4 = ("1f1b", "interleaved_1f1b", "zbv")
QUICK_SHARED = (  # of those on 4 whose ranks share sequences or experts
    "parallel.cp=4 parallel.context=ring",
    "parallel=ddp parallel.cp=2",
    "parallel=fsdp2 parallel.cp=2 parallel.context=ring",
    "parallel=tp parallel.tp=2 parallel.cp=2 parallel.context=ulysses",
    "parallel=pp parallel.pp=2 parallel.cp=2",
    "parallel=fsdp2 parallel.ep=2",
    "parallel=fsdp2 parallel.ep=4 parallel.reshard_after_forward=false",
    "parallel=hsdp parallel.ep=2",
    "parallel=fsdp2 parallel.pp=2 parallel.ep=2",
    "parallel=fsdp2 parallel.tp=2 parallel.ep=4",
    "parallel=tp parallel.tp=2 parallel.cp=2 parallel.ep=4",
)


def is_quick(layout: Layout) -> bool:
    _, schedule, name = layout.overrides.partition("parallel=pp parallel.schedule=")
    if layout.ranks == 4 and schedule:
        return name in QUICK_ON_4
    if layout.ranks == 4 and ("parallel.cp=" in layout.overrides or "parallel.ep=" in layout.overrides):
        return layout.overrides in QUICK_SHARED
    return layout.ranks < 8 or layout.overrides in QUICK_ON_8


def cases_of(layout: Layout, count: int, trainings: list[Training]) -> list[Any]:
    """The first training is tried in every test run on most layouts, the others with the slow tests."""
    marks, slow = [gloo_cannot(layout)], [pytest.mark.slow]
    cases = [Case(layout, count, training) for training in trainings]
    return [
        pytest.param(case, marks=marks if case is cases[0] and is_quick(layout) else marks + slow) for case in cases
    ]


def cases_of_families() -> list[Any]:
    """Each family alone and on its layouts with either optimizer. Of those on 2 ranks every second is tried in every
    test run, of the next family the others."""
    found: list[Any] = []
    for place, (family, own) in enumerate(OF_A_FAMILY.items()):
        for number, (layout, count) in enumerate([(MAIN[0], 1), *OF_EACH_FAMILY, *own]):
            quick = layout.ranks <= 2 and number <= len(OF_EACH_FAMILY) + 1 and (place + number) % 2 == 0
            for optimizer in ("sgd", "adamw") if place % 2 == number % 2 else ("adamw", "sgd"):
                case = Case(layout, count, Training(family, optimizer, "fp64"))
                found.append(case if quick else pytest.param(case, marks=[gloo_cannot(layout), pytest.mark.slow]))
                quick = False
    return found


CASES = [
    *[case for layout in MAIN for times, trainings in FLOAT64.items() for case in cases_of(layout, times, trainings)],
    *[Case(layout, 3, Training("tied", "sgd", "fp64")) for layout in OPTIONS],
    *[Case(layout, 3, STREAMS) for layout in [*STREAMED, *ACTIVATIONS]],
    Case(STATIC_GRAPH, 1, Training("tied", "sgd", "fp64")),
    *[case for layout in MAIN if layout.ranks == 4 for case in cases_of(layout, 3, FLOAT32)],
    *[Case(MAIN[0], 1, training) for training in FLOAT32],
    *[
        case
        for layout in TENSOR
        for times, trainings in TENSOR_FLOAT64.items()
        for case in cases_of(layout, times, trainings)
    ],
    *[Case(layout, 3, TENSOR_STREAMS) for layout in [*STREAMED_TENSOR, *TENSOR_ACTIVATIONS]],
    *[
        pytest.param(Case(layout, 3, Training("grouped heads", "sgd", "fp32")), marks=pytest.mark.slow)
        for layout in TENSOR
        if layout.ranks == 4 and layout.overrides != "parallel=fsdp2 parallel.tp=2"
    ],
    *[
        Case(layout, 3, Training("grouped heads", "sgd", "fp32"))
        for layout in TENSOR
        if layout.overrides == "parallel=fsdp2 parallel.tp=2"
    ],
    *[case for layout in CONTEXT for case in cases_of(layout, 3, CONTEXT_TRAININGS)],
    *[
        pytest.param(Case(layout, 3, CONTEXT_FLOAT32), marks=pytest.mark.slow)
        for layout in CONTEXT
        if layout.ranks == 2
    ],
    *[Case(layout, 1, CONTEXT_TRAININGS[0]) for layout in CONTEXT if layout.ranks == 2],
    *[Case(layout, 3, CONTEXT_TRAININGS[0]) for layout in CONTEXT_ACTIVATIONS],
    *[case for layout, count in PIPELINE for case in cases_of(layout, count, PIPELINE_TRAININGS)],
    *[
        pytest.param(Case(layout, count, PIPELINE_TRAININGS[0]), marks=[gloo_cannot(layout), pytest.mark.slow])
        for layout, count in PIPELINE_MODES
    ],
    *[Case(MAIN[0], times, training) for times, trainings in TENSOR_FLOAT64.items() for training in trainings],
    *[pytest.param(Case(layout, 3, FLOAT64[3][0]), marks=pytest.mark.slow) for layout in COMPILED],
    *[pytest.param(Case(layout, 3, TENSOR_FLOAT64[3][0]), marks=pytest.mark.slow) for layout in COMPILED_TENSOR],
    *[pytest.param(Case(layout, 3, CONTEXT_TRAININGS[0]), marks=pytest.mark.slow) for layout in COMPILED_CONTEXT],
    *[
        pytest.param(Case(layout, 3, EXPERT_PARALLEL_TRAININGS[0]), marks=pytest.mark.slow)
        for layout in COMPILED_EXPERT_PARALLEL
    ],
    *[case for layout in EXPERT_PARALLEL for case in cases_of(layout, 3, EXPERT_PARALLEL_TRAININGS)],
    *[
        case
        for layout, count in EXPERT_PARALLEL_PIPELINE
        for case in cases_of(layout, count, [Training("experts for pp", "sgd", "fp64")])
    ],
    *[case for layout in EXPERTS for case in cases_of(layout, 3, EXPERT_TRAININGS[3])],
    *[
        pytest.param(Case(layout, times, training), marks=pytest.mark.slow)
        for times, layouts in ((1, EXPERTS), (3, MORE_EXPERTS))
        for layout in layouts
        for training in EXPERT_TRAININGS[times]
    ],
    *[
        pytest.param(
            Case(layout, count, Training("experts for pp", optimizer, "fp64")),
            marks=[gloo_cannot(layout), pytest.mark.slow],
        )
        for layout, count in EXPERTS_PIPELINE
        for optimizer in ("sgd", "adamw")
    ],
    *cases_of_families(),
    pytest.param(Case(COMPILED[-2], 3, STREAMS), marks=pytest.mark.slow),
    Case(COMPILED_TENSOR[1], 3, TENSOR_STREAMS),
    *MUP,
    *IN_TURN,
]


def write_trajectories(cases: list[Case], folder: Path) -> None:
    """What the oracle does, once for all layouts."""
    for case in {case.training: case for case in cases}.values():
        config, dtype = config_of(case), BOUNDS[case.training.precision].dtype
        found = train(shape_of(config.model), SEED, dtype, batches(), recipe_of(config))
        assert found.margin > LEAST_MARGIN, f"a token of {case.training} could go to either of two experts"
        torch.save(found, folder / f"{case.training}.pt")


def run(cases: list[Case], folder: Path) -> dict[Case, Differences | RanksFailed]:
    """Runs cases of as many ranks in one go. If it fails, each layout alone, to see which it is."""
    ranks = cases[0].layout.ranks
    try:
        of_ranks = run_ranks(ranks, run_cases, [(case, config_of(case)) for case in cases], folder, timeout=800)
    except RanksFailed as error:
        layouts = {case.layout for case in cases}
        if len(layouts) == 1:
            return dict.fromkeys(cases, error)
        alone = [run([case for case in cases if case.layout == layout], folder) for layout in layouts]
        return {case: found for part in alone for case, found in part.items()}
    return {case: Differences.worst(found) for case, *found in zip(cases, *of_ranks, strict=True)}


@pytest.fixture(scope="session")
def differences(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Differences]:
    """Runs the selected cases, all those of as many ranks when the first of them is asked for."""
    selected = [item.callspec.params["case"] for item in request.session.items if is_parity(item)]  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("oracle")
    run_ranks(1, write_trajectories, selected, folder)
    known: dict[Case, Differences | RanksFailed] = {}

    def of(case: Case) -> Differences:
        if case not in known:
            known.update(run([other for other in selected if other.layout.ranks == case.layout.ranks], folder))
        found = known[case]
        if isinstance(found, RanksFailed):
            raise found
        return found.promised(case.training)

    return of


def is_parity(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == test_a_layout_gives_the_run_of_the_plain_loop.__name__


@pytest.mark.timeout(900)  # the first case waits for all others of its number of ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_gives_the_run_of_the_plain_loop(
    case: Case, differences: Callable[[Case], Differences], record_property: Callable[[str, object], None]
) -> None:
    found = differences(case)
    record_property("parity", entry(case, found))
    assert found.wrong(BOUNDS[case.training.precision]) == []


def degrees_of(case: Case) -> dict[str, int]:
    """Of the axes that the layout uses. ep takes its ranks from shard, cp or tp, so one of them is there as well."""
    parallel = config_of(case).parallel
    degrees = {"shard": parallel.dp_shard, "replicate": parallel.dp_replicate}
    degrees |= {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep}
    return {axis: degree for axis, degree in degrees.items() if degree > 1}


def test_every_run_tries_each_axis_alone_and_with_each_other() -> None:
    params = [case for case in CASES if not isinstance(case, Case) and pytest.mark.slow not in case.marks]
    quick = [*[case for case in CASES if isinstance(case, Case)], *[case.values[0] for case in params]]
    used = [degrees_of(case) for case in quick]
    for degree in (2, 4):
        for axis in ("shard", "replicate", "tp", "pp", "cp"):
            assert {axis: degree} in used
        assert {"shard": degree, "ep": degree} in used
    together = [set(degrees) for degrees in used]
    for pair in itertools.combinations(("shard", "replicate", "tp", "pp", "cp"), 2):
        assert set(pair) in together
    for axis in ("shard", "tp", "cp"):
        assert {axis, "ep"} in together
    for axis in ("replicate", "pp"):
        assert {axis, "shard", "ep"} in together
    assert any(len(axes) == 3 for axes in together) and any(len(axes) == 4 for axes in together)
