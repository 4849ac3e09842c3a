"""Expert parallelism: ranks along `ep` have different experts of each layer, and tokens go to them and back."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # documented; has no public name. torch 2.11, 2.15
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from models.decoder import Decoder
from models.moe import Dispatcher, Experts, MoE, WholeSequences, permuted, routers
from parallel.local import local
from parallel.sequence import SequenceShare


def share_routers(model: Decoder, share: SequenceShare | None, tp: DeviceMesh) -> None:
    """Lets routers see whole sequences where they ask for them. tp: the mesh of the axis alone."""
    for router in routers(model):
        router.sequences = SharedSequences(share, tp)


def cut_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Gives each rank its share of the experts of every layer. mesh: of the axis ep alone."""
    for module in model.modules():
        if isinstance(module, MoE):
            experts = module.experts
            for name, parameter in list(experts.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, nn.Parameter(cut))
            experts.forward = partial(_apply, experts)  # type: ignore[method-assign]
            module.dispatcher = Exchange(mesh.get_group())


def _apply(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    gate = None if experts.gate is None else local(experts.gate)
    return experts.apply_weights(rows, counts, gate, local(experts.up), local(experts.down))


class SharedSequences(WholeSequences):
    """Of sequences that ranks along cp share, and along tp between them."""

    def __init__(self, share: SequenceShare | None, tp: DeviceMesh) -> None:
        super().__init__()
        self.share, self.tp = share, tp
        self.ranks = tp.size() * (1 if share is None else share.size)

    def whole(self, values: Tensor) -> Tensor:
        if self.tp.size() > 1:
            parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.tp.size())]
            dist.all_gather(parts, values.contiguous(), group=self.tp.get_group())
            values = torch.cat(parts, dim=1)
        return values if self.share is None else self.share.whole(values)

    def own(self, values: Tensor) -> Tensor:
        values = values if self.share is None else self.share.own(values)
        return values.chunk(self.tp.size(), dim=1)[self.tp.get_local_rank()]


class Exchange(Dispatcher):
    """Sends each token to the ranks that have its experts, and takes back what they give (Lepikhin et al. 2021,
    GShard). Every rank may send any number to any other, none too. Waits for the device, to know how many."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: those for the first expert of all first; counts: int64 [experts of all ranks]."""
        ranks = self.group.size()
        sent = counts.view(ranks, -1)  # [to rank, its experts]
        received = collectives.wait_tensor(collectives.all_to_all_single(sent.contiguous(), None, None, self.group))
        out, back = sent.sum(1).tolist(), received.sum(1).tolist()
        theirs = self._exchange(rows, back, out)

        # From each rank they come by expert; the experts take them by expert from all ranks.
        number = torch.arange(sent.shape[1], device=rows.device).repeat(ranks).repeat_interleave(received.flatten())
        order = number.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        found = experts(permuted(theirs, order, place), received.sum(0))
        return self._exchange(permuted(found, place, order), out, back)

    def _exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, self.group)
