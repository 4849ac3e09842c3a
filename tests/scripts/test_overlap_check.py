"""The script that several GPUs are checked with, tried where there are none."""

import pytest
from torch.distributed.pipelining import PipelineStage

from scripts.overlap_check import LAYOUT, SMALL, measure
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.skipif(hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"), reason="torch 2.11 cannot run it over gloo")
def test_exchanges_are_a_part_of_the_step() -> None:
    for by_turns, one_by_one, exchanges in run_ranks(4, measure, f"{SMALL} {LAYOUT} parallel.ep=2", "cpu"):
        assert 0 < exchanges < one_by_one * 3  # of another step
        assert by_turns > 0
