"""Learning rates against the formulas of the loops whose results are to be reproduced."""

import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import ROOT
from training.config import ScheduleConfig, ScheduleKind
from training.schedule import Schedule


def schedule(kind: str, peak: float = 6e-4, steps: int = 19073, batch_tokens: int = 524288, **keys: Any) -> Schedule:
    return Schedule(ScheduleConfig(kind=ScheduleKind[kind], **keys), peak, steps, batch_tokens)


def nanogpt(it: int, learning_rate: float, min_lr: float, warmup_iters: int, lr_decay_iters: int) -> float:
    """get_lr of nanoGPT with the warm-up of build-nanogpt and llm.c, which reaches the peak in its last step."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@settings(deadline=None, max_examples=100)
@given(
    steps=st.integers(1, 1000),
    warmup=st.floats(0, 0.99),
    final=st.sampled_from([0.0, 0.1, 1.0]),
    place=st.floats(0, 1.2),
)
def test_cosine_is_nanogpts(steps: int, warmup: float, final: float, place: float) -> None:
    warmup_steps, it = int(warmup * steps), int(place * steps)
    ours = schedule("warmup_cosine", 6e-4, steps, warmup_steps=warmup_steps, final_share=final)
    assert ours.lr(it) == pytest.approx(nanogpt(it, 6e-4, 6e-4 * final, warmup_steps, steps), rel=1e-12, abs=1e-18)


def test_the_rates_of_llm_c_on_124m() -> None:
    """6e-4 to 0 over 18,865 steps, 700 of them warm-up."""
    ours = schedule("warmup_cosine", 6e-4, 18865, warmup_steps=700, final_share=0.0)
    assert ours.lr(0) == pytest.approx(6e-4 / 700)
    assert ours.lr(699) == ours.lr(700) == 6e-4
    assert ours.lr(701) < 6e-4
    assert ours.lr(700 + 18165 // 3) == pytest.approx(0.75 * 6e-4)
    assert ours.lr(18865) == 0.0
    assert 0 < ours.lr(18864) < 1e-10


def test_warmup_stable_decay() -> None:
    """Up in 10 steps, level for 70, down to a tenth over 20."""
    ours = schedule("warmup_stable_decay", 1.0, 100, warmup_steps=10, decay_steps=20, final_share=0.1)
    rates = [ours.lr(step) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:81] == [1.0] * 71
    assert rates[81:] == pytest.approx([1 - 0.9 * step / 20 for step in range(1, 21)])


def test_linear() -> None:
    ours = schedule("linear", 2.0, 50, warmup_steps=10, final_share=0.25)
    assert [ours.lr(step) for step in (0, 9, 10, 20, 30, 50, 70)] == pytest.approx(
        [0.2, 2.0, 2.0, 1.625, 1.25, 0.5, 0.5]
    )


def test_constant() -> None:
    ours = schedule("constant", 2.0, 50, warmup_steps=4)
    assert [ours.lr(step) for step in (0, 1, 2, 3)] == [0.5, 1.0, 1.5, 2.0]
    assert {ours.lr(step) for step in range(4, 60)} == {2.0}


@pytest.mark.parametrize("kind", [kind.name for kind in ScheduleKind])
def test_without_warmup_the_first_step_has_the_peak(kind: str) -> None:
    assert schedule(kind, 1.0, 10, warmup_steps=0).lr(0) == 1.0
    assert schedule(kind, 1.0, 1, warmup_steps=0, decay_steps=0).lr(0) == 1.0
    assert schedule(kind, 1.0, 1).lr(0) == 1.0


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        ({}, 50),
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 0}, 0),
        ({"warmup_tokens": 3000}, 3),
        ({"warmup_tokens": 3001}, 4),
        ({"warmup_share": 0.2}, 200),
        ({"warmup_share": 0.0}, 0),
    ],
)
def test_units_of_the_warmup(keys: dict[str, float], warmup: int) -> None:
    """In steps, in tokens (a step begun is a step) or as a share of 1,000 steps; a twentieth where nothing is said."""
    ours = schedule("constant", 1.0, 1000, batch_tokens=1000, **keys)
    expected = [(step + 1) / warmup for step in range(warmup)] + [1.0] * 2
    assert [ours.lr(step) for step in range(warmup + 2)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "decay"),
    [({}, 200), ({"decay_steps": 7}, 7), ({"decay_tokens": 2500}, 3), ({"decay_share": 0.5}, 500)],
)
def test_units_of_the_decay(keys: dict[str, float], decay: int) -> None:
    ours = schedule("warmup_stable_decay", 1.0, 1000, batch_tokens=1000, warmup_steps=0, final_share=0.0, **keys)
    assert [ours.lr(1000 - decay), ours.lr(1000)] == [1.0, 0.0]
    assert ours.lr(1000 - decay + 1) == pytest.approx(1 - 1 / decay)


@settings(deadline=None, max_examples=100)
@given(
    kind=st.sampled_from([kind.name for kind in ScheduleKind]),
    steps=st.integers(1, 300),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0, 0.5),
    final=st.floats(0, 1),
)
def test_rates_rise_then_never_rise_again(kind: str, steps: int, warmup: float, decay: float, final: float) -> None:
    ours = schedule(kind, 1.0, steps, warmup_share=warmup, decay_share=decay, final_share=final)
    rates = [ours.lr(step) for step in range(steps + 5)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert all(before < after for before, after in pairwise(rates[: top + 1]))
    assert all(before >= after for before, after in pairwise(rates[top:]))
    assert all(rate > 0 for rate in rates[:steps])
    assert min(rates[top:]) >= final - 1e-12
    assert [ours.lr(step) for step in reversed(range(steps + 5))] == rates[::-1]


def test_it_needs_no_torch() -> None:
    command = "import sys, training.schedule, training.files, training.refusal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0
