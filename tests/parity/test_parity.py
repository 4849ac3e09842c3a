"""Promise 1: the layout never changes the run. Every layout against a plain loop in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.oracle import train
from tests.parity.cases import SEED, Case, Training, batches, config_of, recipe_of, shape_of
from tests.parity.compare import BOUNDS, Differences, run_cases
from tests.parity.layouts import MAIN, OPTIONS
from tests.parity.table import TABLE
from tests.ranks import RanksFailed, run_ranks

# Each layout and accumulation with both optimizers and both models, not with each pair of them.
FLOAT64 = {
    1: [Training("tied", "sgd", "fp64"), Training("untied", "adamw", "fp64")],
    3: [Training("untied", "sgd", "fp64"), Training("tied", "adamw", "fp64")],
}
FLOAT32 = [Training("tied", "sgd", "fp32"), Training("untied", "adamw", "fp32")]

CASES = [
    *[Case(layout, times, training) for layout in MAIN for times, trainings in FLOAT64.items() for training in trainings],
    *[Case(layout, 3, Training("tied", "sgd", "fp64")) for layout in OPTIONS],
    *[Case(layout, 3, training) for layout in MAIN if layout.ranks == 4 for training in FLOAT32],
    *[Case(MAIN[0], 1, training) for training in FLOAT32],
]


def write_trajectories(cases: list[Case], folder: Path) -> None:
    """What the oracle does, once for all layouts."""
    for case in {case.training: case for case in cases}.values():
        config, dtype = config_of(case), BOUNDS[case.training.precision].dtype
        found = train(shape_of(config), SEED, dtype, batches(), recipe_of(config))
        torch.save(found, folder / f"{case.training}.pt")


@pytest.fixture(scope="session")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Differences]:
    """Runs the selected cases, all those of as many ranks in one go, when the first of them is asked for."""
    selected = [item.callspec.params["case"] for item in request.session.items if is_parity(item)]  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("oracle")
    run_ranks(1, write_trajectories, selected, folder)
    groups: dict[int, dict[Case, Differences] | RanksFailed] = {}

    def run(ranks: int) -> dict[Case, Differences] | RanksFailed:
        cases = [case for case in selected if case.layout.ranks == ranks]
        try:
            of_ranks = run_ranks(ranks, run_cases, [(case, config_of(case)) for case in cases], folder, timeout=300)
        except RanksFailed as error:
            return error
        return {case: Differences.worst(found) for case, *found in zip(cases, *of_ranks, strict=True)}

    def of(case: Case) -> Differences:
        if case.layout.ranks not in groups:
            groups[case.layout.ranks] = run(case.layout.ranks)
        group = groups[case.layout.ranks]
        if isinstance(group, RanksFailed):
            raise group
        request.config.stash.setdefault(TABLE, []).append((case, group[case]))
        return group[case]

    return of


def is_parity(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == test_a_layout_gives_the_run_of_the_plain_loop.__name__


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_gives_the_run_of_the_plain_loop(case: Case, differences: Callable[[Case], Differences]) -> None:
    found, bounds = differences(case), BOUNDS[case.training.precision]
    assert found.initial, "initial weights differ in some bit"
    assert found.copies, "ranks that hold the same part hold different bits"
    assert found.predicted, "predicted tokens are counted wrongly"
    assert found.loss <= bounds.scalar
    assert found.norm <= bounds.scalar
    assert found.token_losses <= bounds.scalar
    assert found.gradient <= bounds.gradient
    assert found.padding == 0.0, "a padded row has a gradient, or a value"
    if (case.training.precision, case.training.optimizer) != ("fp32", "adamw"):  # Adam makes a full step of the rounding of a zero
        assert found.parameters <= 1.0
