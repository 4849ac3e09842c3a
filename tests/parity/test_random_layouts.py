"""The promise of test_parity.py for layouts that nobody chose: random ones with random models, two steps each. Others
are drawn with LAYOUTS_SEED=<a number>."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import torch
import torch.distributed as dist

from models.derive import derive
from parallel.mesh import start_process_group
from tests.oracle import Batch, Trajectory, train
from tests.parity.cases import LEAST_MARGIN, recipe_of, shape_of
from tests.parity.compare import BOUNDS, CPU, Differences, compare, mesh_of
from tests.parity.random_layouts import Drawn, illegal, legal
from tests.parity.random_table import row
from tests.ranks import run_ranks
from training.check import check
from training.ranks import Ranks
from training.resolve import Chosen, resolve

SEED = int(os.environ.get("LAYOUTS_SEED", "1"))
LEGAL, MORE_LEGAL, MANY_LEGAL, ILLEGAL = 4, 10, 200, 400
LRS = (0.004, 0.01)


@dataclass(frozen=True)
class Task:
    """redrawn: how often the first weights were, since a router's choice hung on rounding."""

    drawn: Drawn
    batches: list[Batch]
    expected: Trajectory
    redrawn: int


def draw_tasks(numbers: range) -> dict[int, list[Task]]:
    """By the number of ranks."""
    found = defaultdict(list)
    for number in numbers:
        random = Random(derive(SEED, number))
        drawn = legal(random, number)
        config = drawn.config
        config.model.vocab_size = drawn.vocabulary
        batches = [draw_batch(drawn, step) for step in range(len(LRS))]
        expected = train(shape_of(config.model), config.seed, torch.float64, batches, recipe_of(config, LRS))
        redrawn = 0
        while expected.margin <= LEAST_MARGIN:
            config.seed += 1000
            redrawn += 1
            print(f"layout {number} begins anew with seed {config.seed}: the margin was {expected.margin:.1e}")
            expected = train(shape_of(config.model), config.seed, torch.float64, batches, recipe_of(config, LRS))
        found[drawn.ranks].append(Task(drawn, batches, expected, redrawn))
    return dict(sorted(found.items()))


def draw_batch(drawn: Drawn, step: int) -> Batch:
    """A sequence has from none to all of its labels; the last token of all is predicted."""
    assert drawn.config.batch_sequences is not None and drawn.config.sequence_length is not None
    generator = torch.Generator().manual_seed(1000 * drawn.number + step)
    sequences, length = drawn.config.batch_sequences, drawn.config.sequence_length
    text = torch.randint(drawn.vocabulary, (sequences, length + 1), generator=generator)
    labels = text[:, 1:].clone()
    share = torch.rand(sequences, 1, generator=generator)
    labels[torch.rand(sequences, length, generator=generator) > share] = -100
    labels[-1, -1] = text[-1, -1]
    return Batch(text[:, :-1].clone(), labels)


def run(tasks: list[Task]) -> list[Differences]:
    ranks = Ranks(start_process_group(CPU, timeout_seconds=60))
    found = []
    for task in tasks:
        config = task.drawn.config
        try:
            mesh = mesh_of(config, {})
            found.append(compare(config, mesh, ranks, task.batches, LRS, task.expected, BOUNDS["fp64"]))
        except Exception as error:
            error.add_note(f"LAYOUTS_SEED={SEED}, {task.drawn}")
            raise
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "numbers",
    [
        range(LEGAL),
        pytest.param(range(LEGAL, MORE_LEGAL), marks=pytest.mark.slow),
        *[
            pytest.param(range(first, min(first + 20, MANY_LEGAL)), marks=pytest.mark.exhaustive)
            for first in range(MORE_LEGAL, MANY_LEGAL, 20)
        ],
    ],
    ids=str,
)
def test_a_random_layout_gives_the_run_of_the_plain_loop(
    numbers: range, record_property: Callable[[str, object], None]
) -> None:
    print(f"LAYOUTS_SEED={SEED}")
    wrong = []
    for count, tasks in draw_tasks(numbers).items():
        for task, *of_ranks in zip(tasks, *run_ranks(count, run, tasks, timeout=300), strict=True):
            print(task.drawn)
            found = Differences.worst(of_ranks)
            record_property("random layout", row(SEED, task.drawn, task.redrawn, found))
            differs = found.wrong(BOUNDS["fp64"])
            wrong += [f"{task.drawn}: {', '.join(differs)}"] if differs else []
    assert not wrong, "\n".join([f"LAYOUTS_SEED={SEED}", *wrong])


def test_a_random_illegal_layout_is_refused_by_its_key() -> None:
    """Before any process: check is a function of the config and the number of ranks."""
    print(f"LAYOUTS_SEED={SEED}")
    random, broken = Random(SEED), set()
    for number in range(ILLEGAL):
        drawn, key = illegal(random, number)
        resolve(drawn.config, drawn.world, Chosen({"model": "drawn"}))
        keys = [problem.key for problem in check(drawn.config, drawn.world)]
        assert any(found.startswith(key) for found in keys), f"LAYOUTS_SEED={SEED}, {key} of {keys}: {drawn}"
        broken.add(key)
    assert len(broken) > 15, "hardly any rule was broken"
