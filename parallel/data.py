"""Data parallelism: DDP where copies are the only axis, FSDP2 where the model's state is shared out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.moe import MoE
from models.roles import FULL_PRECISION, parameter_roles
from parallel.config import Compress, ParallelConfig, Reduce, Strategy
from parallel.powersgd import PowerSGD

ROUNDED = {Compress.bf16: torch.bfloat16, Compress.fp16: torch.float16}


class Replicated:
    """DDP. Gradients are summed over ranks once a step: a second sum would count the first again."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, compress: Compress, powersgd: PowerSGD | None
    ) -> None:
        device = next(model.parameters()).device
        self.call = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=mesh.get_group("dp_replicate"),
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            init_sync=False,  # every rank drew the same values, and check_replicas compares them
        )
        how = BucketSum(mesh.get_group("dp_replicate"), ROUNDED.get(compress), powersgd)
        self.call.register_comm_hook(how, _sum_bucket)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.call.no_sync()


@dataclass(frozen=True)
class BucketSum:
    """How a bucket is summed. dtype: in which it is sent; None: its own."""

    group: dist.ProcessGroup
    dtype: torch.dtype | None
    powersgd: PowerSGD | None


def _sum_bucket(how: BucketSum, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP divides by the number of ranks; our loss is divided by the step's tokens already, so gradients are only
    summed. What PowerSGD sums after the backward pass stays as it is."""
    buffer = bucket.buffer()
    if how.powersgd is not None and how.powersgd.begun:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    sent = buffer if how.dtype is None else buffer.to(how.dtype)
    work = dist.all_reduce(sent, group=how.group, async_op=True)

    def received(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = future.value()[0]
        return summed if sent is buffer else buffer.copy_(summed)

    return work.get_future().then(received)


def whole_parameters(model: Decoder) -> list[nn.Parameter]:
    """What FSDP2 leaves alone: routers, which stay in the masters' dtype, where all of a unit has one, and a compiled
    block can hold no unit of its own. Each rank has all of them; gradients.sum_whole sums their gradients."""
    roles = parameter_roles(model)
    return [parameter for name, parameter in model.named_parameters() if roles[name] in FULL_PRECISION]


class Sharded:
    """FSDP2 on each block and the root (embedding, last norm and head, which may share a weight). With strategy ddp the
    shards are whole copies.
    Routers are left alone (whole_parameters)."""

    def __init__(
        self,
        model: Decoder,
        mesh: DeviceMesh,
        of_experts: DeviceMesh | None,
        config: ParallelConfig,
        compute: torch.dtype,
        reduce: torch.dtype,
    ) -> None:
        """of_experts: the view on which experts are spread, where it is another; each layer's are a unit then."""
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        if config.strategy is Strategy.ddp:
            config = replace(config, reshard_after_forward=False, reshard_after_backward=False, reduce=Reduce.step)
        pin = mesh.device_type == "cuda"
        options: dict[str, Any] = {
            "mesh": _shards(mesh, "dp_shard"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
            "ignored_params": set(whole_parameters(model)),
            "offload_policy": CPUOffloadPolicy(pin_memory=pin) if config.cpu_offload else OffloadPolicy(),
        }
        units: list[Any] = []
        if of_experts is not None:
            units = [module.experts for module in model.modules() if isinstance(module, MoE)]
            whole = config.reshard_after_forward is not False  # a number is one of dp_shard
            for experts in units:
                fully_shard(
                    experts, reshard_after_forward=whole, **options | {"mesh": _shards(of_experts, "expert_shard")}
                )
        parts = [*model.blocks.values(), *([] if model.mtp is None else model.mtp.steps.values())]
        for block in parts:
            fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
        fully_shard(model, **options)
        blocks = [cast(FSDPModule, block) for block in parts]
        for unit in [*units, *blocks, cast(FSDPModule, model)]:
            # The loss is divided by the step's tokens already. Gloo has no scaled sum, so force plain ones.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for place, unit in enumerate(blocks):
            unit.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + config.prefetch_forward])
            before = blocks[max(place - config.prefetch_backward, 0) : place]
            unit.set_modules_to_backward_prefetch(before[::-1])
        self.call: Any = model  # a Decoder and an FSDPModule
        self.once_a_step = config.reduce is Reduce.step or (
            config.reduce is Reduce.auto and config.reshard_after_forward is False
        )
        self.reshard_after_backward = config.reshard_after_backward

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Sums gradients over shards in each micro-batch, or once a step; over replicas always once a step."""
        self.call.set_is_last_backward(last)
        self.call.set_requires_gradient_sync(last or not self.once_a_step)
        self.call.set_requires_all_reduce(last)
        self.call.set_reshard_after_backward(last or self.reshard_after_backward)
        return nullcontext()


def _shards(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The axis along which state is shared out, with that of its copies where there are any."""
    return mesh["dp_replicate", axis] if mesh["dp_replicate"].size() > 1 else mesh[axis]


class Single:
    """One device, nothing to sum."""

    def __init__(self, model: nn.Module) -> None:
        self.call = model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


DataParallel = Single | Replicated | Sharded
