"""Initial weights of tables of many blocks of rows, cut where no block ends, are bitwise those of the rule."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import start_process_group
from tests.oracle import initial_weights
from tests.oracle_model import parameter_shapes
from tests.parity.cases import SEED, Case, Training, config_of, shape_of
from tests.parity.compare import CPU, build, gather, mesh_of
from tests.parity.layouts import Layout, layout
from tests.ranks import run_ranks
from training.config import Config

ROWS = 2_500  # padded to 2,560: three blocks of 1,024, four shards of 640; at 3 ranks shards of 854


def check_initial(config: Config) -> int:
    start_process_group(CPU, timeout_seconds=60)
    spread, _ = build(config, mesh_of(config, {}))
    weights = gather(dict(spread.model.named_parameters()))
    shape = replace(shape_of(config.model), vocab_size=ROWS)
    for name, expected in initial_weights(shape, SEED, torch.float32).items():
        assert torch.equal(weights.values[name][: len(expected)], expected), name
        assert not weights.values[name][len(expected) :].any(), f"padding of {name}"
    assert weights.values.keys() == parameter_shapes(shape).keys()
    dist.destroy_process_group()
    return len(weights.values["embed.tokens.weight"])


@pytest.mark.parametrize(
    "layout",
    [
        layout(1, "parallel=single"),
        layout(3, "parallel=fsdp2"),
        layout(4, "parallel=fsdp2"),
        layout(4, "parallel=hsdp", 2),
    ],
    ids=str,
)
def test_blocks_and_shards_do_not_show(layout: Layout) -> None:
    config = config_of(Case(layout, 1, Training("untied", "adamw", "fp32")))
    config.model.vocab_size = ROWS
    assert run_ranks(layout.ranks, check_initial, config) == [2_560] * layout.ranks
