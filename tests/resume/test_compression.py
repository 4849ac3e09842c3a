"""What PowerSGD has left out of each rank's gradients is state: saved by rank, and given up where ranks change."""

import signal
from functools import partial

import numpy as np
import pytest

from tests.resume.same import check_same_bits, check_steps
from tests.runs.drive import DROPOUT, REFUSED, STEPS, Runs, hit_in_step

KILL, TERM = signal.SIGKILL, signal.SIGTERM
POWERSGD = "optimizer.compression=powersgd optimizer.powersgd_rank=2 optimizer.powersgd_start_step=2"
DDP = f"{DROPOUT} parallel=ddp parallel.bucket_cap_mb=0.01 evals=none"


@pytest.mark.torch211
@pytest.mark.parametrize("compression", [POWERSGD, pytest.param("optimizer.compression=bf16", marks=pytest.mark.slow)])
def test_killed_and_stopped(runs: Runs, compression: str) -> None:
    """Bit for bit, and gradients are the same on both ranks. Stopped before PowerSGD begins, killed after."""
    overrides, kind = f"{DDP} {compression}", compression.split()[0].partition("=")[2]
    said = runs.finish(f"whole-{kind}", f"{overrides} debug=paranoid", ranks=2)
    assert said.count(f"optimizer.compression={kind}: approximate") == 1
    name = f"broken-{kind}"
    runs.start(name, overrides, partial(hit_in_step, 1, TERM), ranks=2)
    runs.die(name, overrides, partial(hit_in_step, 8, KILL), ranks=2)
    said = runs.finish(name, overrides, ranks=2)
    assert "going on from" in said and "starts anew" not in said
    check_steps(runs, name, f"whole-{kind}")
    check_same_bits(runs, name, f"whole-{kind}")
    state = runs.state(name, STEPS)
    if kind == "powersgd":
        mine, other = (state[f"powersgd.{rank}.embed.tokens.weight.error"] for rank in (0, 1))
        assert np.abs(mine).max() > 0 and not np.allclose(mine, other)


@pytest.mark.slow
def test_other_ranks_and_other_keys_start_powersgd_anew(runs: Runs) -> None:
    overrides = f"{DDP} {POWERSGD}"
    runs.start("anew", overrides, partial(hit_in_step, 5, TERM), ranks=2)
    outcome = runs.start("anew", f"{overrides} micro_batch=1", partial(hit_in_step, 8, TERM), ranks=4)[0]
    assert "PowerSGD starts anew" in outcome.said and "saved by 2 ranks, and there are 4" in outcome.said
    assert runs.start("anew", f"{overrides} optimizer.powersgd_rank=3", ranks=4)[0].code == REFUSED
    allowed = "checkpoint.allow_changes=[optimizer.powersgd_rank]"
    outcome = runs.start(
        "anew",
        f"{overrides} micro_batch=1 optimizer.powersgd_rank=3 {allowed}",
        partial(hit_in_step, 10, TERM),
        ranks=4,
    )[0]
    assert "optimizer.powersgd_rank=2, and it is 3" in outcome.said
    allowed = "checkpoint.allow_changes=[optimizer.compression,optimizer.powersgd_rank,optimizer.powersgd_start_step]"
    runs.finish("anew", f"{DROPOUT} evals=none {allowed}")
    assert [line["step"] for line in runs.records("anew")] == list(range(1, STEPS + 1))
    assert not any(name.startswith("powersgd.") for name in runs.state("anew", STEPS))
