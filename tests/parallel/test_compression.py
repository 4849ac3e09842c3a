"""Gradients that torch's DDP sums compressed, against what is rounded or factored by hand."""

import math
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from parallel.config import Compress, Compression
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.memory import memory
from parallel.planning.traffic import Batch as Work
from parallel.powersgd import PowerSGD
from tests.oracle import Batch, initial_weights
from tests.oracle_model import Weights, logits
from tests.parity.cases import LRS, SEED, Case, Training, batches, config_of, shape_of, slices
from tests.parity.compare import CPU, WatchedStep, build, mesh_of
from tests.parity.layouts import layout
from tests.ranks import run_ranks
from training.config import Config

pytestmark = pytest.mark.torch211

ROUNDED = {Compress.bf16: torch.bfloat16, Compress.fp16: torch.float16}
DDP = layout(2, "parallel=ddp parallel.bucket_cap_mb=0.01")


def compressed(kind: str, accumulation: int, precision: str = "fp64", **keys: Any) -> Config:
    config = config_of(Case(DDP, accumulation, Training("tied", "sgd", precision)))
    config.optimizer.compression = Compress[kind]
    for name, value in keys.items():
        setattr(config.optimizer, name, value)
    return config


def counted(batch: Batch) -> int:
    return int((batch.labels != -100).sum())


def taken(step: WatchedStep, config: Config, batch: Batch) -> list[dict[str, Any]]:
    """This rank's micro-batches of a step."""
    assert isinstance(config.micro_batch, int)
    mine = slices(batch, *data_coordinate(step.mesh), config.micro_batch)
    return [{"tokens": micro.tokens, "labels": micro.labels} for micro in mine]


def summed(configs: list[Config]) -> list[Weights]:
    """The gradients of the first step of each."""
    start_process_group(CPU, timeout_seconds=60)
    found, batch, meshes = [], batches()[0], {}  # type: ignore[var-annotated]
    for config in configs:
        _, step = build(config, mesh_of(config, meshes))
        micro_batches = taken(step, config, batch)
        step.backward(micro_batches, sum(int((micro["labels"] != -100).sum()) for micro in micro_batches))
        assert step.gradients.copies_equal
        found.append(step.gradients.values)
    dist.destroy_process_group()
    return found


def of_a_rank(config: Config, rank: int) -> Weights:
    """The plain model's gradient of a rank's share of the loss of the first step."""
    shape, batch = shape_of(config.model), batches()[0]
    weights = {name: value.requires_grad_() for name, value in initial_weights(shape, SEED, torch.float64).items()}
    (mine,) = slices(batch, rank, 2, len(batch.tokens) // 2)
    scores, labels = logits(weights, shape, mine.tokens)[0].flatten(0, 1), mine.labels.flatten()
    (F.cross_entropy(scores, labels, reduction="sum") / counted(batch)).backward()
    return {name: value.grad for name, value in weights.items() if value.grad is not None}


def test_each_ranks_gradient_is_rounded_and_then_summed() -> None:
    """Once a step, whatever the number of micro-batches; the loss is divided by the step's tokens and by nothing
    else."""
    configs = [compressed(kind.name, accumulation) for kind in ROUNDED for accumulation in (1, 3)]
    mine, other = of_a_rank(configs[0], 0), of_a_rank(configs[0], 1)
    for found in run_ranks(2, summed, configs):
        for config, gradients in zip(configs, found, strict=True):
            dtype = ROUNDED[config.optimizer.compression]
            off = 0.0
            for name in mine:
                expected = (mine[name].to(dtype) + other[name].to(dtype)).to(torch.float64)
                torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-15, msg=name)
                off = max(off, float((gradients[name] - mine[name] - other[name]).abs().max()))
            assert off > 1e-6  # it is rounded


def of_masters(rank_by_rank: list[Config]) -> list[tuple[Weights, Weights]]:
    """Of each config the gradient of this rank alone, and the sum over ranks."""
    start_process_group(CPU, timeout_seconds=60)
    found, batch, meshes = [], batches()[0], {}  # type: ignore[var-annotated]
    for config in rank_by_rank:
        spread, step = build(config, mesh_of(config, meshes))
        assert isinstance(spread.data.call, nn.parallel.DistributedDataParallel)
        everyone = counted(batch)
        with spread.data.call.no_sync():
            for inputs in taken(step, config, batch):
                (spread.forward(**inputs) / everyone).sum().backward()
        alone = {name: p.grad.clone() for name, p in spread.model.named_parameters() if p.grad is not None}
        step.zero_grad()
        step.backward(taken(step, config, batch), everyone // 2 if dist.get_rank() else everyone - everyone // 2)
        found.append((alone, step.gradients.values))
    dist.destroy_process_group()
    return found


def test_gradients_of_a_model_that_computes_in_bf16_arrive_whole_and_are_rounded_once() -> None:
    (one,), (other,) = run_ranks(2, of_masters, [compressed("bf16", 3, "bf16")])
    for name, sums in one[1].items():
        assert sums.dtype is torch.float32
        expected = one[0][name].to(torch.bfloat16) + other[0][name].to(torch.bfloat16)
        assert torch.equal(sums, expected.to(torch.float32)), name
    assert any(not torch.equal(value, value.to(torch.bfloat16).float()) for value in one[0].values())


# ---- PowerSGD

ROWS, COLUMNS, RANK, STEPS = 24, 18, 3, 6


def gradients(rank: int) -> list[Tensor]:
    """A matrix a step: what the ranks have in common, and as much that they have not."""
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)

    def drawn(generator: torch.Generator) -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

    return [drawn(common) + drawn(own) for _ in range(STEPS)]


def powersgd(parameter: nn.Parameter, start_step: int = 0) -> PowerSGD:
    group = dist.group.WORLD
    assert group is not None
    return PowerSGD({"weight": parameter}, group, Compression(Compress.powersgd, RANK, start_step), SEED)


def ours(given: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """What each step applies, and this rank's error at the end."""
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    found, applied = powersgd(parameter), list[Tensor]()
    for gradient in given:
        parameter.grad = gradient.clone()
        found.sum_gradients()
        found.keep(torch.tensor(0.0))
        applied.append(parameter.grad.clone())
    return applied, found.errors["weight"]


def torchs(given: list[Tensor]) -> list[Tensor]:
    """The same by torch's hook, which averages, from the same first factor."""
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float64)
    state = PowerSGDState(None, RANK, start_powerSGD_iter=2, min_compression_rate=1)
    model = nn.parallel.DistributedDataParallel(layer)
    model.register_comm_hook(state, powerSGD_hook)
    applied = list[Tensor]()
    for number, gradient in enumerate([given[0], given[0], *given]):  # two steps without compression
        if number == 2:
            state.q_memory_dict[0] = powersgd(cast(nn.Parameter, layer.weight)).factors["weight"].flatten()
            state.p_memory_dict[0] = torch.empty(ROWS * RANK, dtype=torch.float64)
        layer.weight.grad = None
        (model(torch.eye(COLUMNS, dtype=torch.float64)) * gradient.T).sum().backward()
        assert layer.weight.grad is not None
        applied.append(2 * layer.weight.grad)
    return applied[2:]


def both() -> tuple[list[Tensor], Tensor, list[Tensor], Tensor, Tensor]:
    given, rank = gradients(dist.get_rank()), dist.get_rank()
    applied, error = ours(given)
    columns = torch.randn(ROWS, RANK, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    own = torch.Generator().manual_seed(9 + rank)
    low = columns @ torch.randn(RANK, COLUMNS, dtype=torch.float64, generator=own)
    return applied, error, torchs(given), low, ours([low])[0][0]


def test_powersgd_is_that_of_torch_and_loses_nothing() -> None:
    one, other = run_ranks(2, both, group=True)
    for mine, theirs, expected in zip(one[0], other[0], one[2], strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)
    there = torch.stack([*gradients(0), *gradients(1)]).sum(0)
    waiting = one[1] + other[1]
    torch.testing.assert_close(torch.stack(one[0]).sum(0) + waiting, there, rtol=1e-9, atol=1e-9)
    assert waiting.norm() > 0.1 * there.norm()


def test_a_sum_of_powersgds_rank_is_exact() -> None:
    one, other = run_ranks(2, both, group=True)
    torch.testing.assert_close(one[4], one[3] + other[3], rtol=1e-9, atol=1e-9)


def steps_with_spoiled_ones(config: Config) -> list[tuple[bool, Weights, Weights]]:
    """Good, nothing to predict, not finite on the last rank alone, good; with a trial in between that is no step. After
    each: whether it was skipped, the gradients, the state of PowerSGD on this rank."""
    start_process_group(CPU, timeout_seconds=60)
    spread, step = build(config, mesh_of(config, {}))
    assert spread.powersgd is not None and spread.model.norm is not None
    good, found = batches()[0], []
    nothing = Batch(good.tokens, torch.full_like(good.labels, -100))
    for number, batch in enumerate([good, nothing, good, good]):
        spoil = number == 2 and dist.get_rank() == 1
        hook = spread.model.norm.register_forward_hook(lambda *call: call[-1] * math.inf) if spoil else None
        mine = taken(step, config, batch)
        if number == 1:
            step.backward(mine, 1)
            step.zero_grad()
        result = step(mine, sum(int((micro["labels"] != -100).sum()) for micro in mine), LRS[number])
        if hook is not None:
            hook.remove()
        state = {name: value.clone() for name, value in spread.powersgd.tensors().items()}
        found.append((bool(result.skipped), step.gradients.values, state))
    assert step.gradients.copies_equal
    dist.destroy_process_group()
    return found


def test_a_skipped_step_leaves_errors_and_factors_as_they_were() -> None:
    config = compressed("powersgd", 3, powersgd_rank=2, powersgd_start_step=0)
    for found in run_ranks(2, steps_with_spoiled_ones, config):
        assert [skipped for skipped, _, _ in found] == [False, True, True, False]
        first, nothing, spoiled, last = (state for _, _, state in found)
        assert all(torch.equal(first[name], nothing[name]) for name in first)
        assert all(torch.equal(first[name], spoiled[name]) for name in first)
        assert any(not torch.equal(first[name], last[name]) for name in first)
        assert all(value.isfinite().all() for value in last.values())
        assert all(value.isfinite().all() for value in found[-1][1].values())


def first_steps(configs: list[Config]) -> list[list[Weights]]:
    """The gradients of two steps on the same batch, without an update in between."""
    start_process_group(CPU, timeout_seconds=60)
    found, meshes = [], {}  # type: ignore[var-annotated]
    for config in configs:
        _, step = build(config, mesh_of(config, meshes))
        of_config = []
        for _ in range(2):
            step(taken(step, config, batches()[0]), counted(batches()[0]) // 2, 0.0)
            of_config.append(step.gradients.values)
        found.append(of_config)
    dist.destroy_process_group()
    return found


def test_powersgd_begins_after_its_first_steps_and_takes_all_micro_batches_at_once() -> None:
    late = compressed("powersgd", 1, powersgd_rank=2, powersgd_start_step=1)
    configs = [compressed("none", 1), late, compressed("powersgd", 3, powersgd_rank=2, powersgd_start_step=0)]
    configs += [compressed("powersgd", 1, powersgd_rank=2, powersgd_start_step=0)]
    whole, late_found, accumulated, once = run_ranks(2, first_steps, configs)[0]
    cut = {name for name, value in whole[0].items() if late.optimizer.sums.factors(value.shape)}
    assert {"embed.tokens.weight", "blocks.0.attention.qkv.weight"} <= cut < set(whole[0])
    for name, value in whole[0].items():
        torch.testing.assert_close(late_found[0][name], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(accumulated[0][name], once[0][name], rtol=1e-9, atol=1e-12)
        near = torch.allclose(late_found[1][name], value, rtol=1e-3, atol=0)
        assert near is (name not in cut), name
        if name in cut:
            assert torch.linalg.matrix_rank(late_found[1][name]) == 2


def test_the_plan_counts_errors_and_rounded_gradients() -> None:
    def reduction(config: Config) -> int:
        of, work = config.optimizer.sums, Work(1, 1, 16)
        layout = (config.model, config.parallel, config.precision.dtype, config.precision.reduce_dtype, work)
        return memory(*layout, config.activations, 1, compression=of).reduction

    exact, config = compressed("none", 1), compressed("powersgd", 1, powersgd_rank=2)
    assert config.model.vocab_size is not None
    dim, ffn, vocabulary, context = config.model.dim, config.model.feedforward_dim, 67, config.model.context
    cut = dim * (vocabulary + context + 3 * (3 * dim + dim + 2 * ffn))
    assert reduction(config) - reduction(exact) == 2 * 8 * cut
    biases = 3 * (3 * dim + dim + ffn + dim) + 7 * 2 * dim
    assert reduction(compressed("bf16", 1)) - reduction(exact) == 2 * (cut + biases)
