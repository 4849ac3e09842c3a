"""What is counted over the steps, read now and then."""

import pytest
import torch

from training.metrics.meters import Meters, Speed, TooManySkipped
from training.step import StepResult


def meters(skipped: str, max_skipped: int = 3) -> Meters:
    """After these steps, s for a skipped one, and a read."""
    made = Meters(None, torch.device("cpu"), Speed(100, 1, 1.0, None), max_skipped)
    for step, kind in enumerate(skipped, start=1):
        one = torch.tensor(1.0)
        made.add(step, 0.1, StepResult(one, one, one, torch.tensor(float(kind == "s"))))
    made.read(0.0)
    return made


@pytest.mark.parametrize("steps", ["..sss", ".sss.", "sss...ss", "ssss"])
def test_so_many_skipped_in_a_row_are_seen_at_the_next_read(steps: str) -> None:
    with pytest.raises(TooManySkipped, match=rf"not finite in {3 + steps.count('ssss')} steps in a row"):
        meters(steps).check_skipped(len(steps))


@pytest.mark.parametrize("steps", ["ss.ss", ".....", "s.s.s.s"])
def test_fewer_in_a_row_are_not_too_many(steps: str) -> None:
    made = meters(steps)
    made.check_skipped(len(steps))
    assert made.skipped == steps.count("s")


def test_what_saves_cost_stands_at_the_step_that_waited() -> None:
    """A save after step 2 and its end, which comes to light after step 4, both before the next read."""
    made, one = meters(".."), torch.tensor(1.0)
    made.stalled(3, 0.5)
    made.stalled(5, 0.25)
    made.stalled(5, 0.5)
    for step in (3, 4, 5):
        made.add(step, 0.1, StepResult(one, one, one, torch.tensor(0.0)))
    stalls = {record["step"]: record.get("save_stall_seconds") for record in made.read(0.0)}
    assert stalls == {3: 0.5, 4: None, 5: 0.75}
