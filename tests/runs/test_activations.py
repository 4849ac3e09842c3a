"""A whole run with each mode of activations, which says what it does and gives the same records to the bit."""

import re

from tests.runs.drive import DROPOUT, Runs


def test_every_mode_gives_the_same_run_and_says_what_it_costs(runs: Runs) -> None:
    said = runs.finish("none", f"{DROPOUT} activations=none")
    assert "  activations: none\n" in said
    assert len(re.findall(r"  memory at the peak after the first step: \d\.\d\d GiB\n", said)) == 1
    for mode in ("full", "segments", "every_n"):
        said = runs.finish(mode, f"{DROPOUT} activations={mode}")
        assert re.search(rf"  activations: {mode}, [1-9]\d? % more operations\n", said)
        assert runs.records(mode) == runs.records("none")
    for mode in ("selective", "offload"):
        assert f"  activations: {mode}\n" in runs.finish(mode, f"{DROPOUT} activations={mode}")
        assert runs.records(mode) == runs.records("none")


def test_a_run_goes_on_with_another_mode(runs: Runs) -> None:
    runs.finish("unbroken", DROPOUT)
    runs.start("broken", f"{DROPOUT} activations=full max_minutes=1e-9")
    said = runs.finish("broken", f"{DROPOUT} activations=segments parallel=fsdp2", ranks=1)
    assert "changed since the last start: activations.mode" in said
