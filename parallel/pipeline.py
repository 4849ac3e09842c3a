"""Pipeline parallelism: stages of layers on the ranks along `pp`, and the schedule that takes a step's micro-batches
through them. torch.distributed.pipelining has the schedules; evaluation has a pass of its own, since V-shaped schedules
have none and a schedule knows one shape only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.bubble import Clock
from parallel.config import ParallelConfig, Schedule
from parallel.local import local
from parallel.overlap import overlap_exchanges, pair_passes
from parallel.planning.stages import V_SHAPED, Stage, stage_with, stages, unsplit


def sends_to_itself(parallel: ParallelConfig, device_type: str) -> bool:
    """Whether this torch would connect a rank that has two stages in a row to itself, which gloo cannot: seen on 2.11,
    no longer on 2.15."""
    old = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    return old and parallel.schedule in V_SHAPED and device_type != "cuda"


def stages_here(model: ModelConfig, parallel: ParallelConfig, mesh: DeviceMesh) -> list[Stage]:
    """Those of this rank."""
    return [stage for stage in stages(model, parallel) if stage.rank == mesh.get_local_rank("pp")]


def build_decoder(model: ModelConfig, held: list[Stage]) -> Decoder:
    """The parts of the model that a rank holds. What has two names is two parameters there (see Shared)."""
    layers = [layer for stage in held for layer in stage.layers]
    parts = any(stage.first for stage in held), any(stage.last for stage in held)
    return Decoder(model, layers, parts, shares=False)


class TimedStage(PipelineStage):
    """Its passes are counted as time in which the rank computes."""

    clock: Clock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during("busy"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during("busy"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during("busy"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """The stages of this rank and how they are run. A collective over `pp` in all it does.

    passes: for each stage of this rank its module, ready to be called (sharded, in its precision)."""

    def __init__(
        self,
        passes: dict[int, nn.Module],
        model: ModelConfig,
        parallel: ParallelConfig,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.passes, self.model, self.parallel, self.dtype, self.device = passes, model, parallel, dtype, device
        self.stages = stages(model, parallel)
        self.rank_of = [stage.rank for stage in self.stages]
        self.tensors = [0 if stage.first else model.stream_tensors(stage.layers[0]) for stage in self.stages]
        self.group = mesh.get_group("pp")
        self.here = mesh.get_local_rank("pp")
        self.ranks = dist.get_process_group_ranks(self.group)
        self.sequence_cuts = mesh["tp"].size()
        self.schedules: dict[tuple[int, ...], Any] = {}
        self.clock = Clock(device)
        paired = parallel.schedule is Schedule["dualpipev"]
        self.turns = overlap_exchanges(passes.values(), device) if paired else None
        self.divisor = torch.ones(())
        self.loss_sum = torch.zeros(())

    def backward(self, micro_batches: Sequence[dict[str, Tensor]], divisor: Tensor) -> Tensor:
        """Forward and backward of a whole step; gradients of loss / divisor are left in the parameters. Returns the sum
        of token losses on the rank with the last stage, 0 on others."""
        tokens = micro_batches[0]["tokens"]
        shape = (len(micro_batches), *tokens.shape)
        if shape not in self.schedules:
            self.schedules[shape] = self._schedule(*shape)
        whole = {name: torch.cat([batch[name] for batch in micro_batches]) for name in micro_batches[0]}
        self.divisor = divisor
        self.loss_sum = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        with self.clock.during("all"):
            self.schedules[shape].step(target=whole["labels"], return_outputs=False, **whole)
        return self.loss_sum

    def bubble_share(self) -> float:
        """The share of the schedules' time since the last call in which the ranks of the pipeline did not compute, on
        average. Waits for the device."""
        of_ranks: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(of_ranks, self.clock.read(), group=self.group)
        busy, whole = zip(*of_ranks, strict=True)
        return 1 - sum(busy) / (len(busy) * max(whole))  # a rank that ends early waits for the others

    def _loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        """loss: what Head returns, the summed loss of a micro-batch."""
        self.loss_sum += loss.detach().sum()
        return (loss / self.divisor).sum()

    def _schedule(self, count: int, sequences: int, length: int) -> Any:
        """For so many micro-batches of this shape."""
        size = (sequences, length // self.sequence_cuts, self.model.dim)
        streams = [
            tuple(torch.empty(size, dtype=self.dtype, device="meta", requires_grad=True) for _ in range(tensors))
            for tensors in self.tensors
        ]
        loss = torch.empty(1, dtype=torch.promote_types(self.dtype, torch.float32), device="meta", requires_grad=True)
        last, in_one = len(self.rank_of) - 1, unsplit(self.model, self.parallel)
        parts = [
            TimedStage(
                module,
                index,
                last + 1,
                self.device,
                input_args=streams[index],
                output_args=(loss,) if index == last else streams[index + 1],
                group=self.group,
                dw_builder=_nothing_left if index == in_one else None,
            )
            for index, module in self.passes.items()
        ]
        for part in parts:
            part.clock = self.clock
        kind = get_schedule_class(self.parallel.schedule.value)
        held: Any = parts[0] if issubclass(kind, PipelineScheduleSingle) else parts
        schedule = kind(held, count, loss_fn=self._loss, scale_grads=False)
        if self.turns is not None:
            pair_passes(schedule, self.turns, self.clock)
        return schedule

    def forward(self, **inputs: Any) -> Tensor:
        """Decoder.forward of the whole model without gradients, the same result on every rank: stage after stage, the
        stream handed on from rank to rank."""
        tokens = inputs["tokens"]
        shape = (tokens.shape[0], tokens.shape[1] // self.sequence_cuts, self.model.dim)
        stream: Any = ()
        for index, rank in enumerate(self.rank_of):
            if rank != self.here:
                continue
            if index > 0 and self.rank_of[index - 1] != self.here:
                stream = tuple(
                    torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(self.tensors[index])
                )
                for tensor in stream:
                    dist.recv(tensor, self.ranks[self.rank_of[index - 1]], group=self.group)
            stream = self.passes[index](*stream, **inputs)
            if index + 1 < len(self.rank_of) and self.rank_of[index + 1] != self.here:
                for tensor in stream:
                    dist.send(tensor.contiguous(), self.ranks[self.rank_of[index + 1]], group=self.group)
        last = self.rank_of[-1]
        result = stream.contiguous() if self.here == last else self._result(inputs)  # logits may be a view
        dist.broadcast(result, self.ranks[last], group=self.group)
        return result

    def _result(self, inputs: dict[str, Any]) -> Tensor:
        """Room for what the last stage returns."""
        wide = torch.promote_types(self.dtype, torch.float32)
        if inputs.get("labels") is None:
            assert self.model.vocab_size is not None
            return torch.empty(*inputs["tokens"].shape, self.model.vocab_size, dtype=self.dtype, device=self.device)
        shape = (1,) if inputs.get("reduction", "sum") == "sum" else inputs["tokens"].shape
        return torch.empty(shape, dtype=wide, device=self.device)


def _nothing_left() -> Callable[[], None]:
    """What is left of the backward pass of a stage that is `unsplit`. Given this, torch computes all of it at once."""
    return lambda: None


def shared_here(decoder: Decoder, pipeline: Pipeline) -> "list[Shared]":
    """Those of which this rank holds a copy, in the same order on every rank."""
    found = []
    for second, first in sorted(pipeline.model.shared_parameters.items()):
        ranks = [stage_with(name, pipeline.stages).rank for name in (first, second)]
        if pipeline.here in ranks:
            found.append(Shared(decoder, pipeline, [first, second], ranks))
    return found


class Shared:
    """A parameter with two names (a tied head, a value embedding), perhaps on two stages: one parameter to the
    gradient, its norm, the optimizer and checkpoints. The first is the one that counts."""

    def __init__(self, decoder: Decoder, pipeline: Pipeline, names: list[str], ranks: list[int]) -> None:
        """ranks: along pp, the one that has each name."""
        self.decoder, self.group = decoder, pipeline.group
        self.names = [name for name, rank in zip(names, ranks, strict=True) if rank == pipeline.here]
        self.owns = ranks[0] == pipeline.here
        self.peer = pipeline.ranks[ranks[1] if self.owns else ranks[0]]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Leaves the sum over both holders in the gradient of each, bit by bit the same."""
        parameters = [self.decoder.get_parameter(name) for name in self.names]
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            gradients[0].add_(self._exchanged(gradients[0].contiguous()))  # a + b is b + a

    def _exchanged(self, mine: Tensor) -> Tensor:
        theirs = torch.empty_like(mine)
        both = [
            dist.P2POp(dist.isend, mine, self.peer, group=self.group),
            dist.P2POp(dist.irecv, theirs, self.peer, group=self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return theirs

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> None:
        """The owner's tensors (parameters or optimizer state, by name) to the other holder, after they were loaded."""
        kinds = sorted(name.removeprefix(own) for own in self.names[:1] for name in tensors if belongs(name, own))
        for kind in kinds:
            held = [local(tensors[name + kind]) for name in self.names]
            if len(held) == 2:
                held[1].copy_(held[0])
            elif self.owns:
                dist.send(held[0].contiguous(), self.peer, group=self.group)
            else:
                received = torch.empty_like(held[0], memory_format=torch.contiguous_format)
                dist.recv(received, self.peer, group=self.group)
                held[0].copy_(received)


def belongs(name: str, parameter: str) -> bool:
    """Whether a tensor is the parameter's, or a state of it."""
    return name == parameter or name.startswith(f"{parameter}.")
