"""A run moves between layouts, tensor parallelism among them: pairs of random ones, drawn anew with LAYOUTS_SEED=<a
number>. The state comes over bit by bit, and the next step's loss is that of the unbroken run."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.config import Balance, MoE
from parallel.config import Dtype, Scope
from parallel.mesh import LOSS_AXES, data_coordinate, start_process_group, sum_over
from tests.oracle import Batch
from tests.parity.cases import slices
from tests.parity.compare import CPU, WatchedStep, build, gather, mesh_of
from tests.parity.random_layouts import Drawn, check_legal, divisors, draw_activations, draw_expert_ranks, draw_parallel
from tests.ranks import run_ranks
from training.checkpoint.contents import Checkpoints
from training.checkpoint.store import Store
from training.config import CheckpointConfig, Config, Load
from training.ranks import Ranks

SEED = int(os.environ.get("LAYOUTS_SEED", "1"))
LAYOUTS, PAIRS = 6, 7  # for each model
RANKS = [1, 2, 3, 4, 4, 8]
SEQUENCES, LENGTH, VOCABULARY, LR = 24, 8, 67, 0.01
MODELS: list[dict[str, Any]] = [
    {"tied_head": True, "vocab_multiple": 1, "x0": True, "skips": True, "value_embeddings": 1},
    {"tied_head": False, "fused_qkv": False, "bias": False, "vocab_multiple": 128},
    {"moe": MoE(experts=4, dim=22, dense_layers=1, balance=Balance.step, bias_rate=0.02)},
]


@dataclass(frozen=True)
class Move:
    source: Drawn
    target: Drawn


@dataclass(frozen=True)
class Seen:
    """state: weights and optimizer, whole. loss: of the step after it."""

    state: dict[str, Tensor]
    loss: float


def draw(random: Random, number: int, model: dict[str, Any]) -> Drawn:
    """A layout for one of the models, whose sizes no number of ranks but tp divides."""
    ranks = random.choice(RANKS)
    tp = random.choice([degree for degree in divisors(ranks) if degree in (1, 2, 4)])
    pp = random.choice([degree for degree in divisors(ranks // tp) if degree in (1, 2)])
    cp = random.choice(
        [degree for degree in divisors(ranks // tp // pp) if degree == 1 or LENGTH % (2 * degree * tp) == 0]
    )
    there = ranks // tp // pp // cp
    times = random.choice([number for number in divisors(SEQUENCES // there) if pp <= number <= 3])
    config = Config(steps=3, batch_sequences=SEQUENCES, sequence_length=LENGTH)
    config.hardware.device, config.compile.scope, config.precision.dtype = "cpu", Scope.none, Dtype.fp64
    sizes = {"layers": 3, "dim": 24, "heads": 8, "kv_heads": 4, "ffn_dim": 35, "context": LENGTH}
    for name, value in (sizes | model).items():
        setattr(config.model, name, value)
    config.micro_batch = SEQUENCES // there // times
    config.parallel.pp, config.parallel.tp, config.parallel.cp = pp, tp, cp
    draw_parallel(random, config.parallel, there, times)
    if "moe" in model:
        draw_expert_ranks(random, config)
    draw_activations(random, config)
    drawn = Drawn(number, ranks, config, VOCABULARY)
    check_legal(drawn)
    config.model.vocab_size = VOCABULARY
    return drawn


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCABULARY, (3, SEQUENCES, LENGTH + 1), generator=generator)
    return [Batch(step[:, :-1].clone(), step[:, 1:].clone()) for step in text]


def take(step: WatchedStep, config: Config, batch: Batch) -> float:
    """One step; the loss."""
    rank, ranks = data_coordinate(step.mesh, config.parallel.cp)
    assert isinstance(config.micro_batch, int)
    mine = list(slices(batch, rank, ranks, config.micro_batch))
    count = sum(micro.labels.numel() for micro in mine)
    result = step([{"tokens": micro.tokens, "labels": micro.labels} for micro in mine], count, LR)
    return float(sum_over(step.mesh, LOSS_AXES, result.loss_sum) / result.predicted)


def save(folder: Path, drawn: Drawn, ranks: Ranks) -> Seen:
    """Two steps and a checkpoint; what it should hold, and how the run goes on unbroken."""
    config = drawn.config
    spread, step = build(config, mesh_of(config, {}))
    checkpoints = Checkpoints(Store(folder, ranks), CheckpointConfig(), spread, step.optimizer, {})
    for batch in batches()[:2]:
        take(step, config, batch)
    checkpoints.save(2, {}, "scheduled")
    return Seen(gather(checkpoints.state()).values, take(step, config, batches()[2]))


def load(folder: Path, drawn: Drawn, ranks: Ranks) -> Seen:
    """The same from the checkpoint, into a model that began with other values."""
    config = drawn.config
    config.seed += 1
    spread, step = build(config, mesh_of(config, {}))
    checkpoints = Checkpoints(Store(folder, ranks), CheckpointConfig(), spread, step.optimizer, {})
    saved = checkpoints.store.newest()
    assert saved is not None
    checkpoints.restore(saved, Load.all)
    return Seen(gather(checkpoints.state()).values, take(step, config, batches()[2]))


Doing = Callable[[Path, Drawn, Ranks], Seen]


def do_all(doing: Doing, tasks: list[tuple[Path, Drawn]]) -> list[Seen]:
    ranks = Ranks(start_process_group(CPU, timeout_seconds=60))
    found = []
    for folder, drawn in tasks:
        try:
            found.append(doing(folder, drawn, ranks))
        except Exception as error:
            error.add_note(f"LAYOUTS_SEED={SEED}, {folder.name}, {drawn}")
            raise
    dist.destroy_process_group()
    return found if ranks.rank == 0 else []


def do_by_ranks(doing: Doing, tasks: list[tuple[Path, Drawn]]) -> dict[tuple[Path, int], Seen]:
    """By folder and number of the layout. All layouts of as many ranks in one go."""
    by_ranks: dict[int, list[tuple[Path, Drawn]]] = defaultdict(list)
    for folder, drawn in tasks:
        by_ranks[drawn.ranks].append((folder, drawn))
    found: dict[tuple[Path, int], Seen] = {}
    for count, same in by_ranks.items():
        seen = run_ranks(count, do_all, doing, same, timeout=200)[0]
        found |= {(folder, drawn.number): one for (folder, drawn), one in zip(same, seen, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_move_between_random_layouts(tmp_path: Path) -> None:
    print(f"LAYOUTS_SEED={SEED}")
    random, moves = Random(SEED), list[Move]()
    for kind, model in enumerate(MODELS):
        drawn = [draw(random, LAYOUTS * kind + number, model) for number in range(LAYOUTS)]
        pairs = [Move(source, target) for source in drawn for target in drawn if source is not target]
        moves += random.sample(pairs, PAIRS)
    sources = {move.source.number: move.source for move in moves}
    folders = {number: tmp_path / f"from layout {number}" for number in sources}
    unbroken = do_by_ranks(save, [(folders[number], source) for number, source in sources.items()])
    moved = do_by_ranks(load, [(folders[move.source.number], move.target) for move in moves])
    for move in moves:
        folder = folders[move.source.number]
        expected, found = unbroken[folder, move.source.number], moved[folder, move.target.number]
        told = f"LAYOUTS_SEED={SEED}, from {move.source} to {move.target}"
        assert found.state.keys() == expected.state.keys(), told
        different = [name for name, value in expected.state.items() if not torch.equal(found.state[name], value)]
        assert not different, f"{told}: {different}"
        assert found.loss == pytest.approx(expected.loss, rel=1e-9), told
