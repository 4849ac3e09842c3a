"""What it means that a restart is invisible."""

import numpy as np

from tests.runs.drive import STEPS, Runs


def check_steps(runs: Runs, name: str, whole: str) -> None:
    """Every step was done, and each time it was done it had the sequences and the rate that the unbroken run had."""
    expected = {traced.step: traced for traced in runs.traced(whole)}
    found = runs.traced(name)
    assert {traced.step for traced in found} == set(expected) == set(range(1, STEPS + 1))
    for traced in found:
        assert (traced.rows, traced.lr) == (expected[traced.step].rows, expected[traced.step].lr), traced.step


def check_same_bits(runs: Runs, name: str, whole: str, step: int = STEPS) -> None:
    """Metrics, scores, weights and optimizer."""
    assert runs.records(name) == runs.records(whole)
    assert runs.evals(name) == runs.evals(whole)
    assert runs.status(name)["state"] == "finished"
    check_same_state(runs, name, whole, step)


def check_same_state(runs: Runs, name: str, whole: str, step: int = STEPS) -> None:
    found, expected = runs.state(name, step), runs.state(whole, step)
    assert list(found) == list(expected)
    assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []


def check_near(runs: Runs, name: str, whole: str, relative: float, state: float) -> None:
    """The same within rounding. relative: of losses, norms and scores; state: largest difference of an element."""
    found, expected = runs.records(name), runs.records(whole)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([x[key] for x in found], [x[key] for x in expected], rtol=relative, err_msg=key)
    scores, wanted = runs.evals(name), runs.evals(whole)
    assert [(x["step"], x["task"], x["metric"]) for x in scores] == [
        (x["step"], x["task"], x["metric"]) for x in wanted
    ]
    np.testing.assert_allclose([x["value"] for x in scores], [x["value"] for x in wanted], rtol=relative)
    one, other = runs.state(name, STEPS), runs.state(whole, STEPS)
    assert {key for key in other if np.abs(one[key] - other[key]).max() > state} == set()
