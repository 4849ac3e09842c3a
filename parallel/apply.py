"""A plain model and a mesh to the same model spread over the mesh: the order of all axes, on one screen."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.activations import keep_activations
from parallel.compile import compile_model
from parallel.config import (
    UNCOMPRESSED,
    ActivationsConfig,
    CompileConfig,
    Compress,
    Compression,
    Dtype,
    ParallelConfig,
    Scope,
    Strategy,
)
from parallel.data import DataParallel, Replicated, Sharded, Single
from parallel.materialize import materialize
from parallel.planning.stages import SPLIT, as_scheduled
from parallel.powersgd import PowerSGD
from parallel.precision import LowPrecision, compute_dtype, master_dtype
from parallel.replicas import check_replicas

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline, Shared


@dataclass
class Spread:
    """A model spread over the mesh. `model` has the parameters, under the names of the plain model."""

    model: Decoder
    data: DataParallel
    compiled: Scope
    alike: dict[str, float] = field(default_factory=dict)  # what gradients.sum_alike sums over tp
    pipeline: "Pipeline | None" = None
    shared: "list[Shared]" = field(default_factory=list)
    powersgd: PowerSGD | None = None

    def forward(self, **inputs: Tensor | str | None) -> Tensor:
        """Decoder.forward, a collective under FSDP2. With a pipeline, without gradients."""
        return self.data.call(**inputs) if self.pipeline is None else self.pipeline.forward(**inputs)

    def step(self, micro_batches: list[dict[str, Any]], divisor: Tensor) -> Tensor:
        """With a pipeline: forward and backward over a step's micro-batches (Pipeline.backward)."""
        assert self.pipeline is not None
        return self.pipeline.backward(micro_batches, divisor)

    def copy_shared(self, state: dict[str, Tensor]) -> None:
        """After a load: parameters that two stages hold, and their part of a state by name, from the one that owns
        them to the other."""
        for shared in self.shared:
            shared.copy(dict(self.model.named_parameters()) | state)

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
    compression: Compression = UNCOMPRESSED,
) -> Spread:
    """Builds the model on the meta device, spreads it, and gives it memory and first values. `mesh` is None on a single
    device."""
    if parallel.pp > 1:
        from parallel.pipeline import (  # imports FSDP, which takes seconds
            Pipeline,
            build_decoder,
            shared_here,
            stages_here,
        )

        assert mesh is not None
        held = stages_here(model, parallel, mesh)
        activations = as_scheduled(activations, parallel)
        if parallel.schedule in SPLIT:  # nor can a backward pass in two parts be compiled
            compile = replace(compile, scope=Scope.none)
    with torch.device("meta"):
        decoder = Decoder(model) if parallel.pp == 1 else build_decoder(model, held)
    if master_dtype(precision) is not torch.float32:
        decoder.to(master_dtype(precision))
    compute = compute_dtype(precision)
    low = compute is not master_dtype(precision)

    # Here, in this order: tensor and expert cuts, context, activations, compile.
    alike: dict[str, float] = {}
    if parallel.tp > 1:
        from parallel.tensor import cut_tensors, overlap_communication  # imports DTensor, which takes seconds

        assert mesh is not None
        alike = cut_tensors(decoder, mesh["tp"])
        if parallel.async_tp:
            overlap_communication(mesh["tp"])
    parts = {0: decoder}
    if parallel.pp > 1:
        parts = {stage.index: decoder.stage(stage.layers, (stage.first, stage.last)) for stage in held}
    for part in parts.values():
        keep_activations(part, activations, device)
        compiled = compile_model(part, compile, device)
    spreads: dict[int, DataParallel] = {}
    powersgd = None
    if parallel.strategy is not Strategy.single and not parallel.torch_ddp:
        assert mesh is not None
        for index, part in parts.items():
            spreads[index] = Sharded(part, mesh, parallel, compute, compute_dtype(reduce))
        materialize(decoder, seed, device, torch.device("cpu") if parallel.cpu_offload else None)
    else:
        materialize(decoder, seed, device)
        if compression.kind is Compress.powersgd:
            assert mesh is not None
            group = mesh.get_group("dp_replicate")
            powersgd = PowerSGD(dict(decoder.named_parameters()), group, compression, seed)
        for index, part in parts.items():
            callee = LowPrecision(part, compute) if low else part
            if parallel.torch_ddp:
                assert mesh is not None
                spreads[index] = Replicated(callee, mesh, parallel, compression.kind, powersgd)
            else:
                spreads[index] = Single(callee)
    check_replicas(decoder, mesh)
    spread = Spread(decoder, next(iter(spreads.values())), compiled, alike, powersgd=powersgd)
    if parallel.pp > 1:
        assert mesh is not None
        passes = {index: data.call for index, data in spreads.items()}
        spread.pipeline = Pipeline(passes, model, parallel, mesh, compute, device)
        spread.shared = shared_here(decoder, spread.pipeline)
    return spread
