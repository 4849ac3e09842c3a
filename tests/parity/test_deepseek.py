"""Promise 1 for latent attention, groups of experts and further tokens: every layout against one device, whose model
tests/models compare with restatements of their own."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from parallel.mesh import start_process_group
from tests.oracle import Trajectory
from tests.parity.cases import LENGTH, SEQUENCES, VOCABULARY, batches
from tests.parity.compare import BOUNDS, CPU, Differences, build, compare, largest, mesh_of
from tests.parity.families import DEEPSEEK
from tests.ranks import run_ranks
from training.check import check
from training.compose import compose
from training.config import Config
from training.ranks import Ranks
from training.refusal import Refusal
from training.resolve import World, data_ranks, resolve

pytestmark = pytest.mark.torch211

LRS = (0.01, 0.008, 0.006)
OPTIMIZERS = {"sgd": "optimizer=sgd optimizer.beta1=0.9", "adamw": "optimizer=adamw optimizer.weight_decay=0.1"}

# Ranks, overrides of the layout, whether it is tried in every test run.
LAYOUTS = [
    (2, "parallel=tp parallel.tp=2", True),
    (2, "parallel=pp parallel.pp=2 parallel.schedule=1f1b", True),
    (2, "parallel=fsdp2", False),
    (2, "parallel=ddp", False),
    (2, "parallel=fsdp2 parallel.cp=2 parallel.context=gather", True),
    (2, "parallel=fsdp2 parallel.cp=2 parallel.context=ring", False),
    (2, "parallel=fsdp2 parallel.cp=2 parallel.context=ulysses", False),
    (2, "parallel=fsdp2 activations=full", False),
    (4, "parallel=fsdp2 parallel.tp=2", True),
    (4, "parallel=fsdp2 parallel.tp=2 parallel.pp=2 parallel.schedule=1f1b", False),
    (4, "parallel=tp parallel.tp=2 parallel.cp=2 parallel.context=gather", False),
]
EXPERT_LAYOUTS = [
    (2, "parallel=fsdp2 parallel.ep=2", True),
    (4, "parallel=fsdp2 parallel.tp=2 parallel.ep=4", False),
    (4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=1f1b parallel.ep=2", False),
]
# Where gradients are computed in two passes: of a stage that is `unsplit`, and of one that is not. zbv stands for all.
SPLIT_LAYOUTS = [
    (2, "parallel=pp parallel.schedule=zbv", True),
    (2, "parallel=pp parallel.schedule=dualpipev", False),
    (2, "parallel=pp parallel.schedule=interleaved_zero_bubble", False),
    (4, "parallel=fsdp2 parallel.pp=2 parallel.schedule=zbv parallel.reshard_after_forward=false", False),
    (4, "parallel=pp parallel.tp=2 parallel.pp=2 parallel.schedule=zbv", False),
]


def config_of(model: str, optimizer: str, layout: str = "parallel=single", ranks: int = 1) -> Config:
    run = f"seed=5 steps={len(LRS)} sequence_length={LENGTH} hardware.device=cpu optimizer.clip=0.5 precision=fp64"
    config, chosen = compose(f"{run} {DEEPSEEK[model]} {OPTIMIZERS[optimizer]} {layout}".split())
    config.batch_sequences = SEQUENCES
    world = World(ranks, ranks)
    resolve(config, world, chosen)
    config.micro_batch = SEQUENCES // data_ranks(config) // (6 if "dualpipev" in layout else 3)
    problems = check(config, world)
    assert not problems, Refusal(problems)
    config.model.vocab_size = VOCABULARY
    return config


def trajectory(config: Config) -> Trajectory:
    """On one device, the whole batch at once."""
    spread, step = build(config, None)
    values = dict(spread.model.named_parameters())

    def real(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the vocabulary's padding."""
        padded = {"embed.tokens.weight", "head.weight"}
        rows = {name: VOCABULARY if name in padded else len(value) for name, value in found.items()}
        return {name: value.detach()[: rows[name]].clone() for name, value in found.items()}

    found = Trajectory(real(values), [], [], [], [], [], {})
    for batch, lr in zip(batches(), LRS, strict=False):
        inputs: dict[str, Any] = {"tokens": batch.tokens, "labels": batch.labels}
        spread.model.eval()
        with torch.no_grad():
            found.token_losses.append(spread.forward(**inputs, reduction="none"))
        spread.model.train()
        predicted = int((batch.labels != -100).sum())
        result = step([inputs], predicted, lr)
        found.losses.append(float(result.loss_sum) / predicted)
        found.predicted.append(predicted)
        found.norms.append(float(result.grad_norm))
        found.gradients.append(real(step.gradients.values))
    found.final = real(values)
    return found


def first_rank(model: str, optimizer: str, folder: Path) -> None:
    group = start_process_group(CPU, timeout_seconds=60)
    torch.save(trajectory(config_of(model, optimizer)), folder / "one.pt")
    del group
    dist.destroy_process_group()


def run_layout(config: Config, folder: Path) -> Differences:
    group = start_process_group(CPU, timeout_seconds=60)
    try:
        expected: Trajectory = torch.load(folder / "one.pt", weights_only=False)
        return compare(config, mesh_of(config, {}), Ranks(group), batches()[: len(LRS)], LRS, expected, BOUNDS["fp64"])
    finally:
        dist.destroy_process_group()


def cases() -> list[Any]:
    found = []
    for ranks, layout, quick in [*LAYOUTS, *EXPERT_LAYOUTS, *SPLIT_LAYOUTS]:
        split = (ranks, layout, quick) in SPLIT_LAYOUTS
        for model in DEEPSEEK:
            if ("parallel.ep" in layout and model != "v3") or (model == "one further" and not split):
                continue
            marks: list[Any] = [] if quick and model == "v3" else [pytest.mark.slow]
            if "zbv" in layout or "dualpipev" in layout:
                old = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
                marks.append(pytest.mark.skipif(old, reason="torch 2.11 cannot run it over gloo"))
            found.append(pytest.param(ranks, layout, model, id=f"{model}, {layout}", marks=marks))
    return found


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model the folder of its trajectory, made when it is first asked for."""
    return {model: tmp_path_factory.mktemp(model.replace(" ", "").replace(",", "-")) for model in DEEPSEEK}


@pytest.mark.parametrize(("ranks", "layout", "model"), cases())
def test_same_on_every_layout(ranks: int, layout: str, model: str, trajectories: dict[str, Path]) -> None:
    optimizer, folder = "sgd" if model == "v3" else "adamw", trajectories[model]
    if not (folder / "one.pt").exists():
        run_ranks(1, first_rank, model, optimizer, folder)
    found = Differences.worst(run_ranks(ranks, run_layout, config_of(model, optimizer, layout, ranks), folder))
    assert found.wrong(BOUNDS["fp64"]) == []


def test_further_tokens_are_in_the_gradient_alone() -> None:
    """What is shown does not depend on their weight, the gradient does."""
    config = config_of("v3", "sgd")
    other = copy.deepcopy(config)
    other.model = replace(config.model, mtp_weight=0.1)
    found, less = (run_ranks(1, trajectory_of_first_step, c)[0] for c in (config, other))
    assert found.losses[0] == less.losses[0]
    assert largest((found.gradients[0][name] - less.gradients[0][name]).norm() for name in found.gradients[0]) > 1e-4


def trajectory_of_first_step(config: Config) -> Trajectory:
    group = start_process_group(CPU, timeout_seconds=60)
    found = trajectory(config)
    del group
    dist.destroy_process_group()
    return found
