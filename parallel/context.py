"""Context parallelism: ranks along `cp` share each sequence. Each has two pieces of it, and attention reaches over all
ranks in one of three ways. torch's own context parallelism has no kernel for CPUs (seen on 2.11 and 2.15)."""

import torch
import torch.distributed._functional_collectives as collectives  # documented; has no public name. torch 2.11, 2.15
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from models.attention import AttentionCore
from models.decoder import Decoder
from models.kernels import widened
from models.moe import WholeSequences
from parallel.config import Context
from parallel.ring import Ring
from parallel.sequence import SequenceShare


def share_sequences(model: Decoder, context: Context, share: SequenceShare) -> None:
    """Lets every AttentionCore of a model reach over the ranks of the share, and what predicts further tokens see their
    tokens."""
    kinds = {Context.gather: GatheredCore, Context.ring: RingCore, Context.ulysses: UlyssesCore}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AttentionCore):
                setattr(module, name, kinds[context](child, share))
    if model.mtp is not None:
        model.mtp.sequences = CutSequences(share)


class CutSequences(WholeSequences):
    """Of sequences that ranks along cp share."""

    def __init__(self, share: SequenceShare) -> None:
        super().__init__()
        self.share = share

    def whole(self, values: Tensor) -> Tensor:
        return self.share.whole(values)

    def own(self, values: Tensor) -> Tensor:
        return self.share.own(values)


class GatheredCore(nn.Module):
    """Keys and values of the whole sequence are gathered on each rank (Llama Team 2024)."""

    def __init__(self, core: AttentionCore, share: SequenceShare) -> None:
        super().__init__()
        self.core, self.share = core, share

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """As AttentionCore, of this rank's tokens; documents: of the whole sequence."""
        share, length = self.share, q.shape[2] * self.share.size
        sizes = [k.shape[-1], v.shape[-1]]
        own = DTensor.from_local(torch.cat([k, v], dim=-1), share.mesh, [Shard(2)], run_check=False)
        whole = own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k, v = whole.index_select(2, share.order(length, q.device).argsort()).split(sizes, dim=-1)
        piece, attended = q.shape[2] // 2, []
        for own, place in zip(q.split(piece, dim=2), share.pieces, strict=True):
            end = (place + 1) * piece
            of_keys = None if documents is None else documents[:, :end]
            attended.append(self.core.attend(own, k[:, :, :end], v[:, :, :end], of_keys))
        return torch.cat(attended, dim=2)


class UlyssesCore(nn.Module):
    """An exchange gives each rank the whole sequence for a part of the heads, and another takes it back (Jacobs et al.
    2023, DeepSpeed Ulysses)."""

    def __init__(self, core: AttentionCore, share: SequenceShare) -> None:
        super().__init__()
        self.core, self.share = core, share

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """As AttentionCore, of this rank's tokens; documents: of the whole sequence."""
        share, length, width = self.share, q.shape[2] * self.share.size, v.shape[-1]
        v = widened(v, q.shape[-1])
        order = share.order(length, q.device)
        # [rank, batch, heads, seq / size, head_dim] to each rank its heads; from each its tokens
        parts = torch.cat([heads.unflatten(1, (share.size, -1)) for heads in (q, k, v)], dim=2).movedim(1, 0)
        heads = self._exchange(parts).movedim(0, 2).flatten(2, 3).index_select(2, order.argsort())
        of_rank = [part.shape[1] // share.size for part in (q, k, v)]
        attended = self.core(*heads.split(of_rank, dim=1), None, documents)
        parts = attended.index_select(2, order).unflatten(2, (share.size, -1)).movedim(2, 0)
        return self._exchange(parts).movedim(0, 1).flatten(1, 2)[..., :width]

    def _exchange(self, parts: Tensor) -> Tensor:
        """parts: [size, ...], the i-th for rank i. Returns those that all ranks have for this one."""
        return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, self.share.group)


class RingCore(nn.Module):
    """Keys and values go from rank to rank round the ring while each attends to those that it has; the results are
    merged by their log-sum-exp (Liu et al. 2023, Ring Attention with Blockwise Transformers)."""

    def __init__(self, core: AttentionCore, share: SequenceShare) -> None:
        super().__init__()
        self.core, self.ring = core, Ring(share)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        """As AttentionCore, of this rank's tokens; documents: of the whole sequence."""
        attended = self.ring(q, k, widened(v, q.shape[-1]), documents, self.core.scale, self.core.window)
        return attended[..., : v.shape[-1]]
