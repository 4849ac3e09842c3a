"""Ranks on devices of several kinds: refused before the model is built, unless they are meant."""

import os

from tests.runs.drive import REFUSED, Runs, put


def pretend() -> None:
    """The last rank has another device, and no rank builds a model."""
    from training import place
    from training.devices import Card

    put(place, "card_of", lambda device: Card("H100" if os.environ["RANK"] == "1" else "A100", 80 * 2**30))


def fail_to_build() -> None:
    from training import build

    put(build, "parallelize", None)


def test_refused_unless_allowed(runs: Runs) -> None:
    outcomes = runs.start("mixed", "parallel=ddp", pretend, fail_to_build, ranks=2)
    assert [outcome.code for outcome in outcomes] == [REFUSED] * 2, outcomes
    assert "rank 0 has A100 (80.0 GiB); rank 1 has H100 (80.0 GiB)" in outcomes[0].said
    assert "parallel.allow_mixed_devices=true" in outcomes[0].said and "Traceback" not in outcomes[0].said
    assert runs.status("mixed")["exit_code"] == REFUSED
    runs.finish("mixed", "parallel=ddp parallel.allow_mixed_devices=true steps=3 evals=none", pretend, ranks=2)


def test_what_is_suggested_with_powersgd_is_legal(runs: Runs) -> None:
    powersgd = "parallel=ddp optimizer.compression=powersgd optimizer.powersgd_start_step=0"
    outcome = runs.start("mixed-powersgd", powersgd, pretend, fail_to_build, ranks=2)[0]
    assert "parallel.allow_mixed_devices=true optimizer.compression=bf16" in outcome.said


def half_in_bf16() -> None:
    from parallel import precision

    put(precision, "computes_bf16", lambda device: os.environ["RANK"] == "0")


def test_the_dtype_that_is_chosen_is_one_that_all_devices_compute_in(runs: Runs) -> None:
    words = "parallel=ddp precision=auto steps=3 evals=none"
    assert "parameters, fp32, " in runs.finish("half", words, half_in_bf16, ranks=2)
