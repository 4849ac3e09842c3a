"""A whole run in a mode of activations says what it does and gives the same records to the bit."""

import re

from tests.runs.drive import DROPOUT, Runs


def test_a_mode_gives_the_same_run_and_says_what_it_costs(runs: Runs) -> None:
    said = runs.finish("plain", f"{DROPOUT} activations=none")
    assert "  activations: none\n" in said
    assert len(re.findall(r"  memory at the peak after the first step: \d\.\d\d GiB\n", said)) == 1
    said = runs.finish("full", f"{DROPOUT} activations=full")
    assert re.search(r"  activations: full, [1-9]\d? % more operations\n", said)
    assert runs.records("full") == runs.records("plain")
    assert "  activations: offload, 0 % more operations\n" in runs.finish("offload", f"{DROPOUT} activations=offload")
    assert runs.records("offload") == runs.records("plain")


def test_a_run_goes_on_in_another_mode(runs: Runs) -> None:
    runs.finish("unbroken", DROPOUT)
    runs.start("broken", f"{DROPOUT} activations=full max_minutes=1e-9")
    said = runs.finish("broken", f"{DROPOUT} activations=segments")
    assert "changed since the last start: activations.mode" in said
    assert runs.records("broken") == runs.records("unbroken")
