"""A plain model and a mesh to the same model spread over the mesh: the order of all axes, on one screen."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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
    experts_apart,
)
from parallel.data import DataParallel, Replicated, Sharded, Single, whole_parameters
from parallel.materialize import materialize
from parallel.mesh import context_view, expert_view
from parallel.planning.stages import SPLIT, Stage, as_scheduled
from parallel.powersgd import PowerSGD
from parallel.precision import LowPrecision, compute_dtype, master_dtype
from parallel.replicas import check_replicas
from parallel.sequence import SequenceShare
from parallel.values import check_values

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline, Shared


@dataclass
class Spread:
    """A model spread over the mesh. `model` has the parameters, under the names of the plain model."""

    model: Decoder
    data: DataParallel
    compiled: Scope
    mesh: DeviceMesh | None
    alike: dict[str, float] = field(default_factory=dict)  # what gradients.sum_alike sums over tp
    whole: list[nn.Parameter] = field(default_factory=list)  # what gradients.sum_whole sums over data ranks
    pipeline: "Pipeline | None" = None
    shared: "list[Shared]" = field(default_factory=list)
    share: SequenceShare | None = None  # where ranks share sequences
    views: list[DeviceMesh] = field(default_factory=list)  # of the same ranks, by shared sequences and by experts
    powersgd: PowerSGD | None = None

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share each sequence."""
        return 1 if self.share is None else self.share.size

    def forward(self, **inputs: Any) -> Tensor:
        """Decoder.forward of whole sequences, a collective under FSDP2. With a pipeline, without gradients. Where ranks
        share sequences the summed loss is of this rank's tokens; all else is of the whole, without gradients."""
        if self.share is None:
            return self._forward(inputs)
        found = self._forward(self.share.cut(inputs))
        summed = inputs.get("labels") is not None and inputs.get("reduction", "sum") == "sum"
        return found if summed else self.share.whole(found)

    def _forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.data.call(**inputs) if self.pipeline is None else self.pipeline.forward(**inputs)

    def step(self, micro_batches: list[dict[str, Any]], divisor: Tensor) -> Tensor:
        """With a pipeline: forward and backward over a step's micro-batches (Pipeline.backward)."""
        assert self.pipeline is not None
        if self.share is not None:
            micro_batches = [self.share.cut(inputs) for inputs in micro_batches]
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
    activations = as_scheduled(activations, parallel)
    if parallel.pp > 1 and parallel.schedule in SPLIT:  # nor can a backward pass in two parts be compiled
        compile = replace(compile, scope=Scope.none)
    held = _stages(model, mesh, parallel)
    decoder = _build(model, held, precision)

    # In this order: tensor cuts, context, experts, activations, compile, data.
    alike = _cut_tensors(decoder, mesh, parallel)
    share, of_context = _share_sequences(decoder, parallel, device)
    of_experts = _spread_experts(decoder, mesh, parallel, share, device)
    parts = {stage.index: decoder.stage(stage.layers, (stage.first, stage.last)) for stage in held} or {0: decoder}
    for part in parts.values():
        keep_activations(part, activations, device, apart=of_experts is not None)
        compiled = compile_model(part, part.blocks_by_layer.values(), compile, device, apart=of_experts is not None)
    if parallel.strategy is Strategy.single or parallel.torch_ddp:
        materialize(decoder, seed, device)
        powersgd = _powersgd(decoder, mesh, compression, seed)
        passes = _whole(parts, mesh, parallel, precision, compression, powersgd)
        whole = []
    else:
        assert mesh is not None
        dtypes = compute_dtype(precision), compute_dtype(reduce)
        passes = {index: Sharded(part, mesh, of_experts, parallel, *dtypes) for index, part in parts.items()}
        materialize(decoder, seed, device, torch.device("cpu") if parallel.cpu_offload else None)
        powersgd, whole = None, whole_parameters(decoder)

    check_replicas(decoder, mesh)
    check_values(decoder, mesh)
    views = [view for view in (of_context, of_experts) if view is not None]
    data = next(iter(passes.values()))
    spread = Spread(decoder, data, compiled, mesh, alike, whole, share=share, views=views, powersgd=powersgd)
    if parallel.pp > 1:
        _connect_stages(spread, passes, mesh, parallel, precision, device)
    return spread


def _stages(model: ModelConfig, mesh: DeviceMesh | None, parallel: ParallelConfig) -> list[Stage]:
    """Of the pipeline those of this rank; none without one."""
    if parallel.pp == 1:
        return []
    from parallel.pipeline import stages_here  # imports FSDP, which takes seconds

    assert mesh is not None
    return stages_here(model, parallel, mesh)


def _build(model: ModelConfig, held: list[Stage], precision: Dtype) -> Decoder:
    """On the meta device, in the masters' dtype. held: the stages of a pipeline that are here."""
    with torch.device("meta"):
        if held:
            from parallel.pipeline import build_decoder

            decoder = build_decoder(model, held)
        else:
            decoder = Decoder(model)
    if master_dtype(precision) is not torch.float32:
        decoder.to(master_dtype(precision))
    return decoder


def _cut_tensors(decoder: Decoder, mesh: DeviceMesh | None, parallel: ParallelConfig) -> dict[str, float]:
    if parallel.tp == 1:
        return {}
    from parallel.tensor import cut_tensors, overlap_communication  # imports DTensor, which takes seconds

    assert mesh is not None
    if parallel.async_tp:
        overlap_communication(mesh["tp"])
    return cut_tensors(decoder, mesh["tp"])


def _share_sequences(
    decoder: Decoder, parallel: ParallelConfig, device: torch.device
) -> tuple[SequenceShare | None, DeviceMesh | None]:
    """The share of this rank, and the view of the mesh in which it has one."""
    if parallel.cp == 1:
        return None, None
    from parallel.context import share_sequences  # imports DTensor, which takes seconds

    view = context_view(parallel, device)
    share = SequenceShare(view["cp"])
    share_sequences(decoder, parallel.context, share)
    return share, view


def _spread_experts(
    decoder: Decoder,
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    share: SequenceShare | None,
    device: torch.device,
) -> DeviceMesh | None:
    """The view of the mesh on which experts are spread, where it is not that of the rest of their layer."""
    if decoder.config.moe.experts == 0 or parallel.cp * parallel.tp * parallel.ep == 1:
        return None
    from parallel.expert import cut_experts, share_routers  # imports DTensor, which takes seconds

    view = expert_view(parallel, device) if experts_apart(decoder.config, parallel) else None
    if view is not None and parallel.ep > 1:
        cut_experts(decoder, view["ep"])
    if parallel.cp * parallel.tp > 1:
        assert mesh is not None
        share_routers(decoder, share, mesh["tp"])
    return view


def _powersgd(decoder: Decoder, mesh: DeviceMesh | None, compression: Compression, seed: int) -> PowerSGD | None:
    if compression.kind is not Compress.powersgd:
        return None
    assert mesh is not None
    return PowerSGD(dict(decoder.named_parameters()), mesh.get_group("dp_replicate"), compression, seed)


def _whole(
    parts: dict[int, Decoder],
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    precision: Dtype,
    compression: Compression,
    powersgd: PowerSGD | None,
) -> Mapping[int, DataParallel]:
    """Parts of which each rank has all parameters: on a single device, and copies in torch's DDP."""
    compute = compute_dtype(precision)
    low = compute is not master_dtype(precision)
    callees = {index: LowPrecision(part, compute) if low else part for index, part in parts.items()}
    if not parallel.torch_ddp:
        return {index: Single(callee) for index, callee in callees.items()}
    assert mesh is not None
    copies = mesh, parallel, compression.kind, powersgd
    return {index: Replicated(callee, *copies) for index, callee in callees.items()}


def _connect_stages(
    spread: Spread,
    passes: Mapping[int, DataParallel],
    mesh: DeviceMesh | None,
    parallel: ParallelConfig,
    precision: Dtype,
    device: torch.device,
) -> None:
    """Makes a pipeline of the parts."""
    from parallel.pipeline import Pipeline, shared_here

    assert mesh is not None
    calls = {index: of_stage.call for index, of_stage in passes.items()}
    spread.pipeline = Pipeline(calls, spread.model.config, parallel, mesh, compute_dtype(precision), device)
    spread.shared = shared_here(spread.model, spread.pipeline)
