import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checkpoint.retention import StepInfo, to_delete


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
    assert to_delete([StepInfo(step, False) for step in steps], keep) == expected


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
    assert to_delete(steps, keep) == expected


checkpoints = st.dictionaries(st.integers(0, 10**7), st.booleans()).map(
    lambda found: [StepInfo(step, permanent) for step, permanent in found.items()]
)


@settings(deadline=None)
@given(checkpoints, st.integers(0, 6))
def test_what_stays(steps: list[StepInfo], keep: int) -> None:
    gone = to_delete(steps, keep)
    left = [info for info in steps if info.step not in gone]
    passing = sorted((info.step for info in steps if not info.permanent), reverse=True)

    assert set(gone) <= set(passing)
    assert not steps or max(steps, key=lambda info: info.step) in left
    assert [step for step in passing if step not in gone][:keep] == passing[:keep]
    assert sum(not info.permanent for info in left) <= max(keep, 1)
    assert sum(not info.permanent for info in left) >= min(keep, len(passing))
    assert to_delete(left, keep) == []


@settings(deadline=None)
@given(checkpoints, st.integers(0, 6), st.data())
def test_order_of_the_listing_does_not_matter(steps: list[StepInfo], keep: int, data: st.DataObject) -> None:
    assert to_delete(data.draw(st.permutations(steps)), keep) == to_delete(steps, keep)
