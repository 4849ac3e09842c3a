"""Tensor and sequence parallelism: how each part of a model is cut along `tp`.

Between parts the residual stream is cut along the sequence. A part that mixes tokens gathers the sequence, works on its
share of the heads, features or vocabulary, and gives back sums that are scattered over the sequence again (Korthikanti
et al. 2022, Reducing Activation Recomputation in Large Transformer Models). What each rank holds stays a DTensor on
`tp`, so that FSDP2, checkpoints and norms see the whole parameter."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives  # documented; has no public name. torch 2.11, 2.15
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from models.attention import Attention
from models.decoder import Decoder
from models.embedding import Embedding, ValueEmbedding
from models.feedforward import FeedForward
from models.head import IGNORED, Head, TokenLoss
from models.latent import LatentAttention
from models.mix import Mix, weighted_sum
from models.moe import Experts, Router
from models.multitoken import Join
from models.norm import HeadsNorm, mean_square
from models.softcap import softcapped
from parallel.local import is_cut, local_region

SEQUENCE = Shard(1)  # of [batch, seq, dim]

Row = Mapping[str, ParallelStyle]  # the style of each child; of the part itself under ""


class OnShares(ParallelStyle):
    """A module whose parameters all ranks hold whole, each for its share of the sequence: it has a part of their
    gradient (see `cut_tensors`)."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_cut, placement=Replicate()))
        module.forward = partial(self.call, module, device_mesh)
        return module


def _normalize(norm: nn.LayerNorm, mesh: DeviceMesh, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, _own(norm.weight), _own(norm.bias), norm.eps)


def _normalize_rms(norm: nn.RMSNorm, mesh: DeviceMesh, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, _own(norm.weight), norm.eps)


def _project(linear: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    return F.linear(x, _own(linear.weight), _own(linear.bias))


def _join(join: Join, mesh: DeviceMesh, first: Tensor, second: Tensor) -> Tensor:
    return F.linear(torch.cat([first, second], dim=-1), _own(join.weight))


def _own(parameter: Any) -> Any:
    """None where a norm has none."""
    return None if parameter is None else parameter.to_local()


def _mix(mix: Mix, mesh: DeviceMesh, *tensors: Tensor) -> Tensor:
    return weighted_sum([getattr(mix, name).to_local() for name in mix.names], tensors)


def _look_up_positions(table: nn.Embedding, mesh: DeviceMesh, positions: Tensor) -> Tensor:
    """positions: of the whole sequence, [seq] or [batch, seq]. Returns vectors of this rank's share."""
    weight: Any = table.weight
    share = positions.shape[-1] // mesh.size()
    return F.embedding(positions.narrow(-1, mesh.get_local_rank() * share, share), weight.to_local())


class Gathered(ParallelStyle):
    """A module without parameters that takes a share of the sequence and gives all of it, to be used by each rank for
    its heads: so the gradient of the whole is summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = partial(_gather, device_mesh)
        return module


def _gather(mesh: DeviceMesh, x: Tensor) -> Tensor:
    share: DTensor = DTensor.from_local(x, mesh, [SEQUENCE], run_check=False)
    return share.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class OnHeads(OnShares):
    """A norm of queries or keys, of which each rank has those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HeadsNorm):
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, partial(_cut, placement=Shard(0)))
        module.forward = partial(_normalize_heads, module, device_mesh)  # type: ignore[method-assign]
        return module


def _normalize_heads(norm: HeadsNorm, mesh: DeviceMesh, x: Tensor) -> Tensor:
    def of_all(own: Tensor) -> Tensor:
        total: Tensor = _SummedBothWays.apply(mean_square(own), mesh.get_group())
        return total / mesh.size()

    return norm.normalized(x, _own(norm.weight), of_all)


class _SummedBothWays(torch.autograd.Function):
    """The sum over ranks, each of which has its own use for it: so its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduce(value, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient.contiguous(), "sum", ctx.group), None


class VocabularyTable(ParallelStyle):
    """A table whose rows are cut. Takes all tokens, gives the vectors of this rank's share of the sequence. (torch's
    RowwiseParallel gives every rank the gradient of the whole table.)"""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_cut, placement=Shard(0)))
        weight: Any = module.weight
        module.forward = partial(_look_up, module, device_mesh, *local_region(weight)[0])
        return module


def _look_up(table: nn.Module, mesh: DeviceMesh, first: int, stop: int, tokens: Tensor) -> Tensor:
    """tokens: [batch, seq]; this rank has rows first to stop. Returns [batch, seq / ranks, dim]."""
    weight: Any = table.weight
    here = (tokens >= first) & (tokens < stop)
    own = F.embedding(torch.where(here, tokens - first, 0), weight.to_local()) * here.unsqueeze(-1)
    vectors: DTensor = DTensor.from_local(own, mesh, [Partial()], run_check=False)
    return vectors.redistribute(placements=[SEQUENCE]).to_local()


class VocabularyParallel(ParallelStyle):
    """Rows of the head are cut, and the loss is made of each rank's scores: they are never gathered. Takes a share of
    the sequence, gives the losses of all of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head) and isinstance(module.loss, TokenLoss)
        distribute_module(module, device_mesh, partial(_cut, placement=Shard(0)))
        module.loss = VocabularyParallelLoss(module.loss, module)
        return parallelize_module(module, device_mesh, _gathers(3))


def _cut(name: str, module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for own_name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(own_name, nn.Parameter(cut))


def _gathers(inputs: int) -> ParallelStyle:
    """A part whose first input is a share of the sequence and is needed whole."""
    others = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(SEQUENCE, *others), desired_input_layouts=(Replicate(), *others))


# How each part is cut. Each takes the stream as a share of the sequence and gives it back as one; Head gives losses.
# Subclasses have their parent's row; users add rows for parts of their own.
ROWS: dict[type[nn.Module], Row] = {
    ValueEmbedding: {"table": ColwiseParallel()},
    Mix: {"": OnShares(_mix)},
    Embedding: {
        "tokens": VocabularyTable(),
        "positions": OnShares(_look_up_positions),
    },
    Attention: {
        "": _gathers(4),
        "qkv": ColwiseParallel(),
        "q": ColwiseParallel(),
        "k": ColwiseParallel(),
        "v": ColwiseParallel(),
        "q_norm": OnHeads(_normalize_rms),
        "k_norm": OnHeads(_normalize_rms),
        "mix": OnShares(_mix),
        "out": RowwiseParallel(output_layouts=SEQUENCE),
    },
    # Each rank makes the narrow vectors of its share, and only these are gathered.
    LatentAttention: {
        "q": ColwiseParallel(input_layouts=SEQUENCE),
        "q_down": OnShares(_project),
        "q_norm": OnShares(_normalize_rms),
        "q_up": ColwiseParallel(input_layouts=SEQUENCE),
        "kv_down": OnShares(_project),
        "kv_norm": OnShares(_normalize_rms),
        "kv_up": ColwiseParallel(input_layouts=SEQUENCE),
        "shared_key": Gathered(),
        "out": RowwiseParallel(output_layouts=SEQUENCE),
    },
    Join: {"": OnShares(_join)},
    FeedForward: {
        "": _gathers(1),
        "gate": ColwiseParallel(use_local_output=False),  # a DTensor knows its width where it does not divide
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(output_layouts=SEQUENCE),
    },
    nn.LayerNorm: {"": OnShares(_normalize)},
    nn.RMSNorm: {"": OnShares(_normalize_rms)},
    Head: {"": VocabularyParallel()},
    # Each rank routes the tokens of its share; experts are spread by parallel.expert.
    Router: {},
    Experts: {},
}


def cut_tensors(model: Decoder, mesh: DeviceMesh) -> dict[str, float]:
    """Cuts every part of a model on the meta device along a mesh of one axis. Raises LookupError that names parts with
    parameters and without a row.

    Returns, by name, the parameters that all ranks hold whole, and by how much their gradients count in the sum over
    the ranks that gives each of them the same bits: 1 where each rank has a part (norms, positions), else what makes a
    mean, since ranks may differ in rounding (biases added after a scatter)."""
    if without := without_row(model):
        raise LookupError(f"tensor parallelism has no row for {', '.join(without)}: add one to parallel.tensor.ROWS")
    shares: set[nn.Module] = set()
    for _, part in list(_parts(model)):
        for child, style in (row_of(part) or {}).items():
            target = part if child == "" else getattr(part, child, None)
            if target is not None:
                parallelize_module(target, mesh, style)
                shares |= {target} if isinstance(style, OnShares) else set()
    model.tie()
    cut = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    placements = {name: parameter.placements for name, parameter in cut.items()}
    whole = [name for name, of_axes in placements.items() if not any(map(is_cut, of_axes))]
    return {name: 1.0 if model.get_submodule(name.rpartition(".")[0]) in shares else 1 / mesh.size() for name in whole}


def overlap_communication(mesh: DeviceMesh) -> None:
    """Lets the compiler cut gathers and scatters beside matrix products into pieces that run while the product does
    (async tensor parallelism). Private in torch, with no public door; the names are those of torch 2.11 and 2.15. Not
    yet run on a GPU."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def row_of(part: nn.Module) -> Row | None:
    """The row of a part's class, or of the nearest class it inherits from."""
    return next((ROWS[kind] for kind in type(part).__mro__ if kind in ROWS), None)


def without_row(model: nn.Module) -> list[str]:
    """Parts of a model, or of the part it is, that have parameters and no row, and parameters that a part's row leaves
    out: each with its class."""
    parts = [("", model)] if row_of(model) is not None else _parts(model)
    found = [f"{name} ({type(part).__name__})" for name, part in parts if row_of(part) is None]
    for name, part in parts:
        row = row_of(part)
        if row:  # one without entries is for what is whole on each rank
            cut = {child for child, style in row.items() if not isinstance(style, PrepareModuleInput)}
            names = [own for own, _ in part.named_parameters()]
            left = [own for own in names if own.rpartition(".")[0].partition(".")[0] not in cut]
            found += [f"{name}.{own} ({type(part).__name__})".lstrip(".") for own in left]
    return found


def _parts(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The outermost modules that have a row, or parameters of their own and none."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_children():
        own = any(True for _ in module.parameters(recurse=False))
        if own or row_of(module) is not None:
            found.append((prefix + name, module))
        else:
            found += _parts(module, f"{prefix}{name}.")
    return found


class VocabularyParallelLoss(nn.Module):
    """TokenLoss on scores of which each rank has those of its rows of the head."""

    def __init__(self, whole: TokenLoss, head: Head) -> None:
        super().__init__()
        self.vocab_size, self.softcap, self.z_loss = whole.vocab_size, whole.softcap, whole.z_loss
        weight: Any = head.weight
        self.first = local_region(weight)[0][0]
        self.group = weight.device_mesh.get_group()

    def forward(self, scores: DTensor, labels: Tensor | None) -> Tensor:
        """scores: [batch, seq, rows of the head], cut along the last dimension. Returns what TokenLoss does."""
        if labels is None:
            return softcapped(scores.full_tensor()[..., : self.vocab_size], self.softcap)
        own = scores.to_local()
        own = softcapped(own.to(torch.promote_types(own.dtype, torch.float32)), self.softcap)
        padded = self.first + own.shape[-1] - self.vocab_size
        if padded > 0:
            columns = torch.arange(self.first, self.first + own.shape[-1], device=own.device)
            own = own.masked_fill(columns >= self.vocab_size, -torch.inf)
        losses: Tensor = _VocabularyParallelCrossEntropy.apply(own, labels, self.first, self.z_loss, self.group)
        return losses


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """logsumexp(scores) - score of the label, from shares of the scores (Shoeybi et al. 2019, Megatron-LM, 3).

    Two all-reduces of a number a token: the maximum, then the sum of exponentials with the label's score."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, first: int, z_loss: float, group: Any) -> Tensor:
        """scores: [batch, seq, share]; labels: [batch, seq]."""
        maximum = _all_reduce(scores.amax(-1), "max", group)
        shifted = scores - maximum.unsqueeze(-1)
        here = (labels >= first) & (labels < first + scores.shape[-1])
        places = torch.where(here, labels - first, 0).unsqueeze(-1)
        picked = torch.where(here, shifted.gather(-1, places).squeeze(-1), 0)
        exponentials = shifted.exp_()
        sums = _all_reduce(torch.stack([exponentials.sum(-1), picked]), "sum", group)
        log_sum = sums[0].log()
        counted = labels != IGNORED
        shares = exponentials.div_(sums[0].unsqueeze(-1))
        slope = counted * (1 + 2 * z_loss * (log_sum + maximum))
        ctx.save_for_backward(shares, places, here & counted, slope)
        return torch.where(counted, log_sum - sums[1], 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, places, picked, slope = ctx.saved_tensors
        scores = shares * (slope * gradient).unsqueeze(-1)
        scores.scatter_add_(-1, places, -(picked * gradient).unsqueeze(-1))
        return scores, None, None, None, None


def _all_reduce(value: Tensor, operation: str, group: Any) -> Tensor:
    reduced: Tensor = collectives.all_reduce(value, operation, group)
    return collectives.wait_tensor(reduced)
