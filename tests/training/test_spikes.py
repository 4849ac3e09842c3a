"""What counts as a spike, and what is left out."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.config import SpikesConfig
from training.data.order import Order
from training.metrics.records import Record
from training.spikes import Spike, Spikes, score


def made(folder: Path, **config: Any) -> Spikes:
    return Spikes(SpikesConfig(**{"threshold": 10.0, "window": 8} | config), folder / "rollbacks.jsonl")


def records(losses: list[float], norms: list[float] | None = None, first: int = 1) -> list[Record]:
    norms = norms or [1.0] * len(losses)
    both = zip(losses, norms, strict=True)
    return [{"step": first + place, "loss": loss, "grad_norm": norm} for place, (loss, norm) in enumerate(both)]


def test_the_score_of_a_normal_distribution_is_its_deviations() -> None:
    drawn = random.Random(0)
    past = [drawn.gauss(5.0, 2.0) for _ in range(100_001)]
    middle, found = score(11.0, past)
    assert middle == pytest.approx(5.0, abs=0.03) and found == pytest.approx(3.0, abs=0.05)


def test_a_few_spikes_in_the_past_change_little() -> None:
    past = [3.0, 3.1, 2.9, 3.05, 2.95, 3.2, 2.8, 3.0, 3.0]
    # median 3.0, absolute deviations 0 0 0 0.05 0.05 0.1 0.1 0.2 0.2: their median 0.05
    assert score(4.0, past) == pytest.approx((3.0, 1.0 / (1.4826 * 0.05)))
    assert score(4.0, [*past[:-1], 1e9])[1] > 5


def test_where_nothing_changes_a_hundredth_is_a_deviation() -> None:
    assert score(3.03, [3.0] * 9) == pytest.approx((3.0, 1.0))
    assert math.isfinite(score(1.0, [0.0] * 9)[1])


NOISE = [3.0, 3.1, 2.9, 3.0, 3.1, 2.9, 3.0, 3.1]


@pytest.mark.parametrize("cut", range(11))
def test_the_first_spike_is_found_however_the_reads_fall(tmp_path: Path, cut: int) -> None:
    spikes = made(tmp_path)
    steps = records([*NOISE, 2.9, 9.0, 50.0])
    found = [spikes.find(steps[:cut]), spikes.find(steps[cut:])] if cut < 10 else [spikes.find(steps)]
    (spike,) = (one for one in found if one is not None)
    assert (spike.step, spike.what, spike.value, spike.median) == (10, "loss", 9.0, 3.0)
    assert [past[0] for past in spikes.past] == [*NOISE[1:], 2.9]


def test_a_norm_is_a_spike_as_well_and_a_fall_is_none(tmp_path: Path) -> None:
    assert made(tmp_path).find(records([*NOISE, 0.1], [1.0] * 9)) is None
    spike = made(tmp_path).find(records([*NOISE, 3.0], [*[1.0] * 8, 1.2]))
    assert spike is not None and (spike.step, spike.what) == (9, "grad_norm")


def test_too_few_steps_and_steps_that_are_not_finite_are_no_past(tmp_path: Path) -> None:
    spikes = made(tmp_path)
    assert spikes.find(records([*NOISE[:7], math.nan, 99.0])) is None
    assert len(spikes.past) == 8
    assert made(tmp_path, threshold=0.0).find(records([*NOISE, 99.0])) is None


def test_what_is_left_out_counts_what_already_was(tmp_path: Path) -> None:
    """Steps of 4 samples from checkpoint 10, which has trained on 40; samples 44 to 51 were left out before."""
    spikes, order = made(tmp_path, before=1, after=2), Order(1000, 5, 0, left_out=((44, 52),))
    rollback = spikes.rollback(Spike(13, "loss", 9.0, 3.0, 20.0), 10, 40 * 5, order, 4)
    # step 11 reads 40-43, step 12 52-55, step 13 56-59, 14 60-63, 15 64-67
    assert (rollback.first, rollback.stop) == (52, 68)
    spikes.rollbacks = [rollback]
    assert spikes.without(order).left_out == ((52, 68),)
    assert spikes.without(Order(1000, 10, 0)).left_out == ()  # samples of another length are others


def test_a_range_may_hold_one_that_was_left_out(tmp_path: Path) -> None:
    spikes, order = made(tmp_path), Order(1000, 5, 0, left_out=((46, 48),))
    rollback = spikes.rollback(Spike(12, "loss", 9.0, 3.0, 20.0), 10, 40 * 5, order, 4)
    # step 11 reads 40-43, step 12 44 45 48 49
    assert (rollback.first, rollback.stop) == (40, 50)
    both = Order(1000, 5, 0, left_out=((46, 48), (40, 50)))
    assert both.unskipped(np.arange(39, 42)).tolist() == [39, 50, 51]


def test_the_folder_knows_what_an_older_checkpoint_does_not(tmp_path: Path) -> None:
    spikes, order = made(tmp_path), Order(1000, 5, 0)
    spikes.find(records(NOISE))
    before = spikes.state()
    spikes.rollbacks.append(spikes.rollback(Spike(9, "loss", 9.0, 3.0, 20.0), 4, 80, order, 4))
    spikes.write()
    again = made(tmp_path)
    again.load(before, again.written())
    assert (again.past, again.rollbacks) == (spikes.past, spikes.rollbacks)
    again.load(spikes.state(), [])  # of another run
    assert again.rollbacks == spikes.rollbacks
    again.load(None, [])
    assert (again.past, again.rollbacks) == ([], [])
