"""A plain model and a mesh to the same model spread over the mesh: the order of all axes, on one screen."""

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
from parallel.planning.stages import SPLIT, as_scheduled
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

    # Here, in this order: tensor cuts, context, experts, activations, compile.
    alike: dict[str, float] = {}
    if parallel.tp > 1:
        from parallel.tensor import cut_tensors, overlap_communication  # imports DTensor, which takes seconds

        assert mesh is not None
        alike = cut_tensors(decoder, mesh["tp"])
        if parallel.async_tp:
            overlap_communication(mesh["tp"])
    share, views = None, []
    if parallel.cp > 1:
        from parallel.context import share_sequences  # imports DTensor, which takes seconds

        views.append(context_view(parallel, device))
        share = SequenceShare(views[-1]["cp"])
        share_sequences(decoder, parallel.context, share)
    of_experts: DeviceMesh | None = None
    if experts_apart(model, parallel):
        from parallel.expert import cut_experts

        of_experts = expert_view(parallel, device)
        views.append(of_experts)
        if parallel.ep > 1:
            cut_experts(decoder, of_experts["ep"])
        compile = replace(compile, scope=Scope.none)  # what goes to other ranks has no fixed size
    if model.moe.experts > 0 and parallel.cp * parallel.tp > 1:
        from parallel.expert import share_routers

        assert mesh is not None
        share_routers(decoder, share, mesh["tp"])
    parts = {0: decoder}
    if parallel.pp > 1:
        parts = {stage.index: decoder.stage(stage.layers, (stage.first, stage.last)) for stage in held}
    for part in parts.values():
        keep_activations(part, activations, device, of_experts is not None)
        compiled = compile_model(part, part.blocks_by_layer.values(), compile, device)
    spreads: dict[int, DataParallel] = {}
    powersgd = None
    if parallel.strategy is not Strategy.single and not parallel.torch_ddp:
        assert mesh is not None
        for index, part in parts.items():
            spreads[index] = Sharded(part, mesh, of_experts, parallel, compute, compute_dtype(reduce))
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
    check_values(decoder, mesh)
    data = next(iter(spreads.values()))
    whole = whole_parameters(decoder) if isinstance(data, Sharded) else []
    spread = Spread(decoder, data, compiled, mesh, alike, whole, share=share, views=views, powersgd=powersgd)
    if parallel.pp > 1:
        assert mesh is not None
        passes = {index: of_stage.call for index, of_stage in spreads.items()}
        spread.pipeline = Pipeline(passes, model, parallel, mesh, compute, device)
        spread.shared = shared_here(decoder, spread.pipeline)
    return spread
