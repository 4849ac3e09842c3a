import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checkpoint.retention import EPHEMERAL, Policy, StepInfo, best, score_of, to_delete


@pytest.mark.parametrize(
    ("steps", "keep", "expected"),
    [
        ([], 3, []),
        ([900], 0, []),
        ([900, 1000, 9900, 10000], 1, [900, 1000, 9900]),  # by name 900 and 9900 would be the newest
        ([900, 1000, 9900, 10000], 2, [900, 1000]),
        ([10000, 900, 9900, 1000], 3, [900]),
        ([900, 1000, 9900, 10000], 0, [900, 1000, 9900]),
        ([900, 1000, 9900, 10000], 9, []),
    ],
)
def test_the_oldest_go_by_number(steps: list[int], keep: int, expected: list[int]) -> None:
    assert to_delete([StepInfo(step, False) for step in steps], Policy(keep)) == expected


@pytest.mark.parametrize(
    ("permanent", "keep", "expected"),
    [
        ({1000}, 1, [900, 9900]),
        ({10000}, 1, [900, 1000]),  # the newest is permanent and not counted, so 9900 stays as well
        ({10000}, 0, [900, 1000, 9900]),
        ({900, 1000, 9900, 10000}, 0, []),
    ],
)
def test_permanent_ones_stay_and_are_not_counted(permanent: set[int], keep: int, expected: list[int]) -> None:
    steps = [StepInfo(step, step in permanent) for step in [900, 1000, 9900, 10000]]
    assert to_delete(steps, Policy(keep)) == expected


def test_ephemeral_ones_go_once_there_is_a_newer_one() -> None:
    infos = [StepInfo(step, False, ephemeral=step in {150, 250, 350}) for step in [100, 150, 200, 250, 300, 350]]
    assert to_delete(infos, Policy(2)) == [100, 150, 250]  # 350 is the newest, and 200 and 300 are two others
    assert to_delete(infos[:-1], Policy(2)) == [100, 150, 250]
    assert to_delete(infos[:1] + infos[-1:], Policy(0)) == [100]


@pytest.mark.parametrize(
    ("scores", "highest", "stays"),
    [
        ({100: 3.0, 200: 2.0, 300: 2.5}, False, 200),
        ({100: 3.0, 200: 2.0, 300: 2.5}, True, 100),
        ({100: 2.0, 200: 2.0}, False, 200),  # of equal ones the newest
        ({100: 2.0, 200: 2.0}, True, 200),
        ({100: math.nan, 200: 9.0}, False, 200),
        ({100: math.nan}, False, None),
        ({100: math.inf, 200: math.nan}, False, 100),
        ({}, True, None),
    ],
)
def test_the_best_stays(scores: dict[int, float], highest: bool, stays: int | None) -> None:
    infos = [StepInfo(step, False, score=scores.get(step)) for step in [100, 200, 300, 400]]
    assert best(infos, highest) == stays
    assert to_delete(infos, Policy(0, "heldout.loss", highest)) == [step for step in [100, 200, 300] if step != stays]


def test_a_score_is_found_by_task_and_metric() -> None:
    lines = [{"task": "heldout", "metric": "loss", "value": 2.5}, {"task": "a.b", "metric": "c", "value": 1}]
    assert score_of({"scores": lines}, "heldout.loss") == 2.5
    assert score_of({"scores": lines}, "a.b.c") == 1.0
    assert (
        score_of({"scores": lines}, "heldout.perplexity") is score_of(None, "heldout.loss") is score_of({}, "") is None
    )


def test_kinds_that_serve_a_restart() -> None:
    assert EPHEMERAL == ("ephemeral", "signal", "test")


infos = st.builds(
    StepInfo,
    step=st.integers(0, 10**7),
    permanent=st.booleans(),
    ephemeral=st.booleans(),
    score=st.none() | st.floats(),
)
checkpoints = st.lists(infos, unique_by=lambda info: info.step)
policies = st.builds(Policy, st.integers(0, 6), st.just("heldout.loss"), st.booleans())


@settings(deadline=None)
@given(checkpoints, policies)
def test_what_stays(steps: list[StepInfo], policy: Policy) -> None:
    gone = to_delete(steps, policy)
    left = [info for info in steps if info.step not in gone]
    newest = max((info.step for info in steps), default=None)
    passing = sorted((info.step for info in steps if not info.permanent and not info.ephemeral), reverse=True)

    assert gone == sorted(gone) and set(gone) <= {info.step for info in steps if not info.permanent}
    assert newest not in gone
    assert best(left, policy.highest) == best(steps, policy.highest)
    assert [step for step in passing if step not in gone][: policy.keep] == passing[: policy.keep]
    assert sum(not info.permanent for info in left) <= policy.keep + 2  # the newest and the best
    assert all(
        info.step in (newest, best(steps, policy.highest)) for info in left if info.ephemeral and not info.permanent
    )
    assert to_delete(left, policy) == []


@settings(deadline=None)
@given(checkpoints, policies, st.data())
def test_order_of_the_listing_does_not_matter(steps: list[StepInfo], policy: Policy, data: st.DataObject) -> None:
    assert to_delete(data.draw(st.permutations(steps)), policy) == to_delete(steps, policy)


@settings(deadline=None)
@given(checkpoints, policies)
def test_a_run_that_saves_one_by_one_never_loses_what_would_stay(steps: list[StepInfo], policy: Policy) -> None:
    """Deleting after each save, in any number of starts, leaves what deleting once at the end leaves: the newest, the
    permanent ones and the best are there all the time."""
    there: list[StepInfo] = []
    for info in sorted(steps, key=lambda info: info.step):
        there.append(info)
        gone = to_delete(there, policy)
        there = [one for one in there if one.step not in gone]
        assert info in there
    gone = to_delete(steps, policy)
    assert there == sorted((info for info in steps if info.step not in gone), key=lambda info: info.step)
