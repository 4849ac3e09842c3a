"""Under each schedule the evaluation and the sample are those of the plain model, between steps and in lengths and
batches that training does not have; and so are steps on sequences of several documents."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.apply import Spread
from parallel.config import Schedule
from parallel.mesh import start_process_group
from tests.oracle import Batch
from tests.parity.cases import LRS, VOCABULARY, Case, Training, batches, config_of
from tests.parity.compare import CPU, WatchedStep, build, evaluate, mesh_of
from tests.parity.layouts import SCHEDULES, layout
from tests.parity.test_parity import gloo_cannot
from tests.ranks import run_ranks
from training.config import Config
from training.evals.sample import generate
from training.ranks import Ranks

SHAPES = [(5, 20), (1, 3), (4, 16), (2, 7)]  # a step has micro-batches of [2, 16]
NAMES = [
    pytest.param(
        name,
        marks=[
            gloo_cannot(layout(2, f"parallel=pp parallel.schedule={name}")),
            *([] if name in ("1f1b", "dualpipev") else [pytest.mark.slow]),
        ],
    )
    for name in SCHEDULES
]


@dataclass
class Seen:
    """Of one evaluation."""

    losses: list[Tensor]  # of tokens, for each shape
    total: list[Tensor]
    sample: list[int]


def trained_and_evaluated(config: Config) -> list[Seen]:
    """Before the first step and after each of two."""
    group = start_process_group(CPU, timeout_seconds=60)
    mesh = mesh_of(config, {})
    spread, step = build(config, mesh)
    found = [look(spread, mesh, Ranks(group))]
    for number, batch in enumerate(batches()[:2]):
        train(step, batch, LRS[number])
        found.append(look(spread, mesh, Ranks(group)))
    dist.destroy_process_group()
    return found


def train(step: WatchedStep, batch: Batch, lr: float) -> None:
    inputs = [
        {"tokens": batch.tokens[i : i + 2], "labels": batch.labels[i : i + 2], **packed(batch.tokens[i : i + 2], i)}
        for i in range(0, 12, 2)
    ]
    step(inputs, int((batch.labels != -100).sum()), lr)


def packed(tokens: Tensor, number: int) -> dict[str, Tensor]:
    """Two documents in each sequence, which end elsewhere in each micro-batch; positions count in each."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    first = (number + 1) % tokens.shape[1]
    documents = (places >= first).long()
    return {"documents": documents, "positions": places - documents * first}


def look(spread: Spread, mesh: dist.device_mesh.DeviceMesh | None, ranks: Ranks) -> Seen:
    generator = torch.Generator().manual_seed(4)
    rows = [Batch(*torch.randint(VOCABULARY, (2, *shape), generator=generator)) for shape in SHAPES]
    losses = [evaluate(spread, mesh, ranks, [batch]) for batch in rows]
    spread.model.eval()
    with torch.no_grad():
        total = [
            spread.forward(tokens=batch.tokens, labels=batch.labels, **packed(batch.tokens, number))
            for number, batch in enumerate(rows)
        ]

    def logits(tokens: Tensor) -> Tensor:
        return spread.forward(tokens=tokens)[..., :VOCABULARY]

    sample = generate(logits, [1, 2, 3], 6, 20, 0.8, seed=9)
    spread.model.train()
    return Seen(losses, total, sample)


@pytest.fixture(scope="module")
def plain() -> list[Seen]:
    return run_ranks(1, trained_and_evaluated, config("parallel=single", 1))[0]


def config(overrides: str, ranks: int) -> Config:
    return config_of(Case(layout(ranks, overrides), 6, Training("untied for pp", "adamw", "fp64")))


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_and_samples_are_the_plain_models(name: str, plain: list[Seen]) -> None:
    assert [schedule.name for schedule in Schedule] == list(SCHEDULES)
    of_ranks = run_ranks(2, trained_and_evaluated, config(f"parallel=pp parallel.schedule={name}", 2))
    for found in of_ranks:
        for seen, expected in zip(found, plain, strict=True):
            for losses, wanted in zip(seen.losses + seen.total, expected.losses + expected.total, strict=True):
                torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-9)
            assert seen.sample == expected.sample
