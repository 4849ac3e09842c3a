"""A plain model and a mesh to the same model spread over the mesh: the order of all axes, on one screen."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.activations import keep_activations
from parallel.compile import compile_model
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Scope, Strategy
from parallel.data import DataParallel, Replicated, Sharded, Single
from parallel.materialize import materialize
from parallel.precision import LowPrecision, compute_dtype, master_dtype
from parallel.replicas import check_replicas


@dataclass
class Spread:
    """A model spread over the mesh. `model` has the parameters, under the names of the plain model."""

    model: Decoder
    data: DataParallel
    compiled: Scope

    def forward(self, **inputs: Tensor | str | None) -> Tensor:
        """Decoder.forward, a collective under FSDP2."""
        return self.data.call(**inputs)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """To be held around forward and backward of a micro-batch; `last` of its step."""
        return self.data.micro_batch(last)


def parallelize(
    model: ModelConfig,
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    precision: Dtype,
    reduce: Dtype,
    compile: CompileConfig,
    activations: ActivationsConfig,
    seed: int,
    device: torch.device,
) -> Spread:
    """Builds the model on the meta device, spreads it, and gives it memory and first values. `mesh` is None on a single
    device."""
    with torch.device("meta"):
        decoder = Decoder(model)
    if master_dtype(precision) is not torch.float32:
        decoder.to(master_dtype(precision))
    compute = compute_dtype(precision)
    low = compute is not master_dtype(precision)

    # Here, in this order: pipeline split, tensor and expert cuts, context, activations, compile.
    if parallel.tp > 1:
        from parallel.tensor import cut_tensors, overlap_communication  # imports DTensor, which takes seconds

        assert mesh is not None
        cut_tensors(decoder, mesh["tp"])
        if parallel.async_tp:
            overlap_communication(mesh["tp"])
    keep_activations(decoder, activations, device)
    compiled = compile_model(decoder, compile, device)
    if parallel.strategy is not Strategy.single and not parallel.torch_ddp:
        assert mesh is not None
        data: DataParallel = Sharded(decoder, mesh, parallel, compute, compute_dtype(reduce))
        materialize(decoder, seed, device, torch.device("cpu") if parallel.cpu_offload else None)
    else:
        materialize(decoder, seed, device)
        callee = LowPrecision(decoder, compute) if low else decoder
        if parallel.strategy is Strategy.ddp:
            assert mesh is not None
            data = Replicated(callee, mesh, parallel)
        else:
            data = Single(callee)
    check_replicas(decoder, mesh)
    return Spread(decoder, data, compiled)
