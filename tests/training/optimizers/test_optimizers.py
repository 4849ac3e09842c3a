"""AdamW and SGD against torch.optim, in float64 over ten steps, some of which are skipped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.decoder import Decoder
from tests.models.build import largest_difference, random_decoder, tiny
from tests.ranks import run_ranks
from training.config import OptimizerConfig, OptimizerKind
from training.optimizers.adamw import AdamW
from training.optimizers.build import build_optimizer
from training.optimizers.sgd import SGD

CONFIGS = {
    "adamw": OptimizerConfig(kind=OptimizerKind.adamw, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8),
    "adamw_without_decay": OptimizerConfig(kind=OptimizerKind.adamw, weight_decay=0.0, beta1=0.8, beta2=0.99, eps=1e-3),
    "sgd": OptimizerConfig(kind=OptimizerKind.sgd, weight_decay=0.1, beta1=0.8),
    "sgd_without_momentum": OptimizerConfig(kind=OptimizerKind.sgd, weight_decay=0.1, beta1=0.0),
}
SKIPPED = (0, 4, 5)
UNUSED = "blocks.1.feedforward.up.weight"  # has no gradient in some steps
RATES = [0.01 * (step + 1) / 4 if step < 4 else 0.02 / step for step in range(10)]
THEIR_NAMES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step", "momentum": "momentum_buffer"}


def torchs(config: OptimizerConfig, model: Decoder) -> torch.optim.Optimizer:
    """The plain loops, with decay on what has two dimensions."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config.kind is OptimizerKind.sgd:
        return torch.optim.SGD(groups, lr=1.0, momentum=config.beta1, foreach=False)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.eps, foreach=False, fused=False)


def ten_steps(config: OptimizerConfig) -> dict[str, float]:
    """Largest difference of each parameter and state from torch.optim, to which skipped steps are none."""
    ours, theirs = (random_decoder(tiny(), dtype=torch.float64) for _ in range(2))
    optimizer, oracle = build_optimizer(config, ours), torchs(config, theirs)
    generator = torch.Generator().manual_seed(3)
    for step, lr in enumerate(RATES):
        skip = step in SKIPPED
        for name, parameter in theirs.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3 - 1)
            unused = name == UNUSED and step in (1, 7)
            parameter.grad = None if unused else gradient
            ours.get_parameter(name).grad = None if unused else gradient * (float("nan") if skip else 1.0)
        before = {name: value.clone() for name, value in whole_state(ours, optimizer.tensors()).items()}
        optimizer.step(lr, torch.tensor(float(skip)))
        if skip:
            for name, value in whole_state(ours, optimizer.tensors()).items():
                assert torch.equal(value, before[name]), (step, name)
            continue
        for group in oracle.param_groups:
            group["lr"] = lr
        oracle.step()
    differences = {name: largest_difference(p, theirs.get_parameter(name)) for name, p in ours.named_parameters()}
    for name, value in optimizer.tensors().items():
        parameter_name, _, key = name.rpartition(".")
        state = oracle.state[theirs.get_parameter(parameter_name)]
        differences[name] = largest_difference(value, state[THEIR_NAMES[key]])
    return differences


def whole_state(model: Decoder, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()} | state


@pytest.mark.parametrize("name", CONFIGS)
def test_ten_steps_are_torchs(name: str) -> None:
    [differences] = run_ranks(1, ten_steps, CONFIGS[name])
    parameters = dict(Decoder(tiny()).named_parameters())
    keys = {"adamw": ["exp_avg", "exp_avg_sq", "step"], "sgd": ["momentum"], "sgd_without_momentum": []}
    state = keys.get(name, keys["adamw"])
    assert set(differences) == set(parameters) | {f"{parameter}.{key}" for parameter in parameters for key in state}
    assert max(differences.values()) <= 1e-12, max(differences, key=lambda key: differences[key])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_is_there_from_the_start(name: str, dtype: torch.dtype) -> None:
    """A checkpoint is loaded into it before the first step. Moments have the parameter's shape and dtype."""
    model = random_decoder(tiny(), dtype=dtype)
    optimizer = build_optimizer(CONFIGS[name], model)
    first = {name: value.clone() for name, value in optimizer.tensors().items()}
    for key, value in first.items():
        assert not value.any() and not value.requires_grad
        if not key.endswith(".step"):
            parameter = model.get_parameter(key.rpartition(".")[0])
            assert (value.shape, value.dtype) == (parameter.shape, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1, torch.zeros(()))
    after = optimizer.tensors()
    assert after.keys() == first.keys()
    assert all(value.any() for value in after.values())


def test_state_is_loaded_in_place() -> None:
    """`tensors` gives the state itself: what is copied into it is what the next step uses."""
    models = [random_decoder(tiny(), dtype=torch.float64) for _ in range(2)]
    one, other = (build_optimizer(CONFIGS["adamw"], model) for model in models)
    for step in range(4):
        if step == 2:
            models[1].load_state_dict(models[0].state_dict())
            for name, value in one.tensors().items():
                other.tensors()[name].copy_(value)
        for optimizer, model in zip((one, other) if step >= 2 else (one,), models, strict=False):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 + step)
            optimizer.step(0.1, torch.zeros(()))
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, models[1].get_parameter(name))


def test_the_config_decides() -> None:
    model = random_decoder(tiny())
    adamw = build_optimizer(CONFIGS["adamw_without_decay"], model)
    assert isinstance(adamw, AdamW) and (adamw.beta1, adamw.beta2, adamw.eps) == (0.8, 0.99, 1e-3)
    sgd = build_optimizer(CONFIGS["sgd"], model)
    assert isinstance(sgd, SGD) and sgd.momentum == 0.8
    assert [group.weight_decay for group in sgd.groups] == [0.1, 0.0]
    parameters: list[nn.Parameter] = [p for group in sgd.groups for p in group.parameters.values()]
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
