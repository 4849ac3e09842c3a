"""Documents that share a sequence do not see each other, on any layout, in any activation mode, compiled or not: what
one is changes no bit of what the model says of another, nor of its gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.config import Attention, MoE, Position
from parallel.compile import allow_graphs
from parallel.mesh import start_process_group
from tests.parity.cases import LENGTH, VOCABULARY, Case, Training, config_of
from tests.parity.compare import CPU, WatchedStep, build, mesh_of
from tests.parity.layouts import layout
from tests.ranks import run_ranks
from training.config import Config
from training.data.packing import packed, without_seams

END, FIRST = VOCABULARY - 1, 7  # tokens of the first document, its end among them
LAYOUTS = [
    "parallel=tp",
    *[f"parallel.cp=2 parallel.context={kind}" for kind in ("gather", "ring", "ulysses")],
    "parallel=pp",
    "parallel=fsdp2",
]
MODES = ["none", "full", "selective"]
KERNELS = ["sdpa", "flash", "math"]
WINDOWED = {"position": Position.rotary, "window": 5}
EXPERTS = MoE(experts=8, dim=24, shared=1, dense_layers=1)
SHAPES: dict[str, dict[str, Any]] = {"learned positions": {}, "rotary, window": WINDOWED}


def documents(seed: int) -> tuple[Tensor, Tensor]:
    """Two documents for each of 4 sequences, [4, FIRST] and [4, LENGTH - FIRST], each with its end."""
    text = torch.randint(END, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
    text[:, FIRST - 1] = text[:, -1] = END
    return text[:, :FIRST], text[:, FIRST:]


def counts(name: str) -> bool:
    """Of tokens that experts got, of all documents."""
    return name.endswith(".load")


def logits_of(step: WatchedStep, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return step.spread.forward(tokens=tokens, **packed(tokens, END))[..., :VOCABULARY]


def gradients_of(step: WatchedStep, tokens: Tensor, of_first: bool) -> dict[str, Tensor]:
    """Of both documents' losses, or of the second's alone."""
    labels = without_seams(tokens, tokens.roll(-1, 1), END)
    if not of_first:
        labels[:, :FIRST] = -100
    inputs = {"tokens": tokens, "labels": labels} | packed(tokens, END)
    parts = [{name: value[start : start + 2] for name, value in inputs.items()} for start in (0, 2)]
    step.backward(parts, int((labels != -100).sum()))
    step.zero_grad()
    return step.gradients.values


def alone(config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the documents by themselves, side by side, and the gradient of the mean of their losses, by the plain
    model: no packing, no mask."""
    plain = replace(config.model, attention=Attention.math)
    single = config_of(Case(layout(1, "parallel=single"), 1, Training("untied for tp", "sgd", "fp64")))
    model = build(replace(single, model=plain), None)[0].model
    found, total = [], torch.zeros(1, dtype=torch.float64)
    for document in documents(0):
        found.append(model(tokens=document)[..., :VOCABULARY].detach())
        labels = document.roll(-1, 1)
        labels[:, -1] = -100
        total = total + model(tokens=document, labels=labels)
    (total / (4 * (LENGTH - 2))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(found, dim=1), gradients


def look(configs: list[Config], bits: bool) -> list[list[str]]:
    """What is wrong with each."""
    start_process_group(CPU, timeout_seconds=60)
    found: list[list[str]] = []
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for config in configs:
        torch.compiler.reset()
        allow_graphs(shapes=2)
        _, step = build(config, mesh_of(config, meshes))
        with torch.compiler.set_stance(force_backend="aot_eager"):
            found.append(wrong(config, step, bits))
    dist.destroy_process_group()
    return found


def wrong(config: Config, step: WatchedStep, bits: bool) -> list[str]:
    """bits: whether the second document's numbers must be the same bits; else within rounding."""
    (first, second), (other, _) = documents(0), documents(1)
    tokens, changed = torch.cat([first, second], dim=1), torch.cat([other, second], dim=1)
    step.spread.model.eval()
    logits, after = logits_of(step, tokens), logits_of(step, changed)
    step.spread.model.train()
    ours, theirs = (gradients_of(step, text, of_first=False) for text in (tokens, changed))
    whole = gradients_of(step, tokens, of_first=True)
    expected, gradients = alone(config)

    def same(found: Tensor, of: Tensor) -> bool:
        return torch.equal(found, of) if bits else bool((found - of).abs().max() < 1e-9)

    held = {
        "the second document's logits": same(logits[:, FIRST:], after[:, FIRST:]),
        "the first document's, which must change": bool((logits[:, :FIRST] != after[:, :FIRST]).any(-1).any()),
        "gradients": not (apart := [name for name in ours if not counts(name) and not same(ours[name], theirs[name])]),
        "the documents alone": bool((logits - expected).abs().max() < 1e-9),
        "their gradient": all(
            (whole[name][: len(of)] - of[: len(whole[name])]).abs().max() < 1e-9
            for name, of in gradients.items()
            if not counts(name)
        ),
    }
    return [f"{what} {apart if what == 'gradients' else ''}" for what, holds in held.items() if not holds]


def config(overrides: str, ranks: int, model: dict[str, Any]) -> Config:
    base = "experts for ep" if "moe" in model else "untied for tp"
    found = config_of(Case(layout(ranks, overrides), 3, Training(base, "sgd", "fp64")))
    return replace(found, model=replace(found.model, **model))


def check(ranks: int, cases: dict[str, Config], bits: bool = True) -> None:
    for of_rank in run_ranks(ranks, look, list(cases.values()), bits, timeout=280):
        assert {name: problems for name, problems in zip(cases, of_rank, strict=True) if problems} == {}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_on_one_rank_with_each_kernel(shape: str) -> None:
    cases = {
        f"{kernel} {mode}": config(
            f"parallel=single activations={mode}", 1, SHAPES[shape] | {"attention": Attention[kernel]}
        )
        for kernel in KERNELS
        for mode in MODES
    }
    check(1, cases)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_on_every_layout_in_every_mode(shape: str) -> None:
    cases = {
        f"{parallel} {mode}": config(f"{parallel} activations={mode}", 2, SHAPES[shape])
        for parallel in LAYOUTS
        for mode in MODES
    }
    check(2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled(scope: str) -> None:
    one = {
        f"{kernel} {mode}": config(
            f"parallel=single compile={scope} activations={mode}", 1, WINDOWED | {"attention": Attention[kernel]}
        )
        for kernel in KERNELS
        for mode in MODES
    }
    check(1, one)
    check(2, {parallel: config(f"{parallel} compile={scope}", 2, WINDOWED) for parallel in LAYOUTS})


def test_experts_see_no_other_document_but_by_rounding() -> None:
    """The number of an expert's rows decides how their products are added up."""
    layouts = ["parallel=fsdp2", "parallel=fsdp2 parallel.ep=2", "parallel.cp=2", "parallel=tp", "parallel=pp"]
    cases = {parallel: config(parallel, 2, {"moe": EXPERTS}) for parallel in layouts}
    check(2, cases, bits=False)
