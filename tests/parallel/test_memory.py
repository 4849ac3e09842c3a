"""The bytes that plans give a rank are those that it holds."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from models.decoder import Block
from parallel.config import Dtype
from parallel.local import local
from parallel.mesh import data_coordinate, start_process_group
from parallel.planning.activations import block_bytes
from parallel.planning.memory import held_values, memory
from parallel.planning.traffic import Batch
from tests.parity.cases import Case, Training, batches, config_of, slices
from tests.parity.compare import CPU, build, mesh_of
from tests.parity.layouts import MAIN, TENSOR
from tests.ranks import run_ranks
from training.config import Config

LAYOUTS = [of for of in [*MAIN, *TENSOR] if of.ranks in (1, 4)]
MODELS = {False: Training("untied", "adamw", "fp64"), True: Training("tied for tp", "adamw", "fp32")}
CASES = [Case(of, 1, MODELS["tp" in str(of)]) for of in LAYOUTS]

Held = tuple[int, int, int, int, int]  # bytes of parameters, gradients and moments; places along dp_shard and tp


def hold(configs: list[Config]) -> list[Held]:
    start_process_group(CPU, timeout_seconds=60)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    try:
        return [held(config, mesh_of(config, meshes)) for config in configs]
    finally:
        dist.destroy_process_group()


def held(config: Config, mesh: DeviceMesh | None) -> Held:
    """What a rank has after a backward pass."""
    assert isinstance(config.micro_batch, int)
    _, step = build(config, mesh)
    micro = next(slices(batches()[0], *data_coordinate(mesh), config.micro_batch))
    step.backward([{"tokens": micro.tokens, "labels": micro.labels}], 1)
    moments = [t for name, t in step.optimizer.tensors().items() if not name.endswith(".step")]
    gradients = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
    places = [0 if mesh is None else mesh.get_local_rank(axis) for axis in ("dp_shard", "tp")]
    return size(step.parameters), size(gradients), size(moments), places[0], places[1]


def size(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.mark.torch211
@pytest.mark.parametrize("ranks", [1, 4])
def test_each_rank_holds_the_bytes_of_the_plan(ranks: int) -> None:
    configs = [config_of(case) for case in CASES if case.layout.ranks == ranks]
    for of_rank in run_ranks(ranks, hold, configs, timeout=120):
        for config, (parameters, gradients, moments, shard, place) in zip(configs, of_rank, strict=True):
            dtype = config.precision.dtype
            planned = held_values(config.model, config.parallel, shard, place) * (8 if dtype is Dtype.fp64 else 4)
            assert (parameters, gradients, moments) == (planned, planned, 2 * planned), (config.parallel, shard, place)


def test_the_first_rank_is_the_one_that_is_planned() -> None:
    config = config_of(Case(MAIN[5], 1, MODELS[False]))
    found = memory(config.model, config.parallel, Dtype.fp64, Dtype.fp64, Batch(1, 1, 16), moments=2)
    most = held_values(config.model, config.parallel, shard_rank=0) * 8
    assert (found.parameters, found.gradients, found.optimizer) == (most, most, 2 * most)
    assert found.total > found.state == 4 * most


@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.bf16, Dtype.fp64])
@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(dim=48, heads=4),
        ModelConfig(dim=48, heads=4, kv_heads=2, ffn_dim=50, bias=False),
        ModelConfig(dim=48, heads=4, kv_heads=1, fused_qkv=False),
    ],
    ids=lambda model: f"kv_heads {model.kv_heads}",
)
def test_a_block_keeps_what_the_formula_says(model: ModelConfig, dtype: Dtype) -> None:
    batch, length = 2, 32
    block = Block(model).to({Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp64: torch.float64}[dtype])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(batch, length, model.dim, dtype=next(block.parameters()).dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x, positions=None, documents=None)
    storages = [tensor.untyped_storage() for address, tensor in kept.items() if address not in parameters]
    assert sum(storage.nbytes() for storage in storages) == block_bytes(model, dtype) * batch * length
