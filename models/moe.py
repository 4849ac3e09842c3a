"""Mixture of experts: a router, the experts it chooses from for each token, and what keeps their loads even."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Balance, ModelConfig, Score
from models.feedforward import FeedForward, activated
from models.roles import Role, Spec, specify

TINY = 1e-20  # beside a sum of sigmoids that may all be 0
ALIGNMENT = 16  # bytes of which grouped_mm wants each row to be a multiple


class MoE(nn.Module):
    """The weighted sum of what a token's experts give, and what the shared ones give (DeepSeekMoE, Dai et al. 2024)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.dispatcher = Dispatcher()
        self.shared = FeedForward(config, config.moe.shared * config.expert_dim) if config.moe.shared else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """x: [batch, seq, dim]; documents: [batch, seq] or None. Returns the shape of x."""
        rows, counts, *back = self.route(x, documents)
        return self.combine(x, self.dispatcher(self.experts, rows, counts), *back)

    def route(self, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the dispatcher takes, and for the way back the weights [batch, seq, top_k] and, of the assignments, the
        order by expert and the place in it."""
        chosen, weights = self.router(x, documents)
        order = chosen.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = permuted(x.flatten(0, 1), order // chosen.shape[-1], place)
        return rows, loads(chosen.flatten(), self.experts.number), weights, order, place

    def combine(self, x: Tensor, found: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """found: what the dispatcher gave. Returns the shape of x."""
        y = (permuted(found, place, order).unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(-2)
        y = self.dropout(y.to(x.dtype))
        return y if self.shared is None else y + self.shared(x)


class Router(nn.Module):
    """Chooses top_k experts for each token, in float32 or wider whatever the others compute in.

    `load`: tokens each expert got in the last step. Its gradient is the count of this step's, so that whatever sums
    gradients over micro-batches and ranks counts each token once. The same for `dropped`, the assignments above
    capacity. `bias`: added to the scores where experts are chosen, not where they are weighted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe, experts = config.moe, config.moe.experts
        self.weight = nn.Parameter(torch.empty(experts, config.dim))
        self.load = nn.Parameter(torch.empty(experts))
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False)
        counted = Spec(Role.balance)
        self.dropped = nn.Parameter(torch.empty(1), requires_grad=self.moe.capacity_factor is not None)
        specify(self, weight=Spec(Role.router, config.init_std), load=counted, bias=counted, dropped=counted)
        self.sequences: WholeSequences = WholeSequences()
        # 1 / predicted tokens of the step: what a token's auxiliary loss counts. No buffer, which DDP would broadcast.
        self.share = torch.zeros(())

    def forward(self, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [batch, seq, dim]. Returns each token's experts and their weights, [batch, seq, top_k] both."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.moe.score is Score.softmax else logits.sigmoid()
        chosen = self._choose(scores)
        weights = scores.gather(-1, chosen)
        if self.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        weights = weights * self.moe.scale
        if self.training:
            if self.moe.capacity_factor is not None:
                whole = self.sequences.whole(chosen)
                kept = within_capacity(whole, documents, self.moe.experts, self.moe.capacity_factor)
                kept = self.sequences.own(kept)
                dropped = of_text(~kept, documents).sum().to(self.dropped.dtype).view(1)
                weights = _Attached.apply(weights * kept, self.dropped, dropped)
            counts = of_text(loads(chosen.flatten(1), self.moe.experts), documents).sum(0)
            weights = _Attached.apply(weights, self.load, counts.to(self.load.dtype))
            for loss in self._losses(logits, scores, chosen, documents):
                weights = _Attached.apply(weights, loss, self.share.to(loss.dtype))
        return chosen, weights

    def _choose(self, scores: Tensor) -> Tensor:
        """Of equal scores that of the lower index, which topk does not promise."""
        batch, seq, experts = scores.shape
        top_k = self.moe.top_k
        if self.moe.forced_balance:
            places = torch.arange(seq * self.sequences.ranks * top_k, device=scores.device) % experts
            return self.sequences.own(places.view(1, -1, top_k).expand(batch, -1, -1)).contiguous()
        preferred = scores.detach() + self.bias
        if self.moe.groups > 1:
            preferred = within_groups(preferred, self.moe.groups, self.moe.top_groups)
        indices = preferred.sort(dim=-1, descending=True, stable=True).indices
        return indices[..., :top_k].contiguous()  # backward keeps it, and a view would keep the others

    def _losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, documents: Tensor | None) -> Iterator[Tensor]:
        """Auxiliary losses, summed over tokens: scalars.

        balance: DeepSeek-V3 (2024), equations 17 to 20, each sequence weighted by its tokens. With `step` the share of
        each expert is that of the whole step before, and there is no loss in the first. z-loss: Zoph et al. 2022,
        equation 5."""
        moe = self.moe
        if moe.balance is not Balance.none:
            shares = scores / (scores.sum(-1, keepdim=True) + TINY)
            if moe.balance is Balance.sequence:
                counts = loads(self.sequences.whole(chosen).flatten(1), moe.experts).to(shares.dtype)
            else:
                counts = self.load.detach().to(shares.dtype)
            assigned = counts.sum(-1, keepdim=True).clamp(min=1)
            overload = moe.experts * counts / assigned  # [batch, experts] or [experts]; 1 is even
            yield moe.balance_weight * of_text(overload * shares.sum(1), documents).sum()
        if moe.z_loss > 0:
            yield moe.z_loss * of_text(logits.logsumexp(-1).square(), documents).sum()


def of_text(values: Tensor, documents: Tensor | None) -> Tensor:
    """values: [batch, ...]. The same, 0 for sequences that only fill a step up: their documents are negative."""
    if documents is None:
        return values
    fills = documents[:, 0].view(-1, *[1] * (values.dim() - 1)) < 0
    return values.masked_fill(fills, 0)


def within_groups(preferred: Tensor, groups: int, top_groups: int) -> Tensor:
    """preferred: [..., experts]. The same, -inf outside of the groups whose two best have the highest sums (DeepSeek-V3
    2024, 2.1.2); of equal groups that of the lower index is kept."""
    grouped = preferred.unflatten(-1, (groups, -1))
    sums = grouped.topk(2, dim=-1).values.sum(-1)
    kept = sums.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
    others = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)


class WholeSequences(nn.Module):
    """What a router sees of its sequences: all. A child without parameters; what shares sequences out replaces it.

    ranks: those that share each sequence."""

    ranks = 1

    def whole(self, values: Tensor) -> Tensor:
        """values: [batch, seq, ...] of this rank's tokens, without gradients, to those of whole sequences."""
        return values

    def own(self, values: Tensor) -> Tensor:
        """Of those of whole sequences this rank's."""
        return values


class _Attached(torch.autograd.Function):
    """Hands a tensor on. In backward `target`, which takes part in nothing else, gets this gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, of_tensor: Tensor) -> tuple[Tensor, Tensor, None]:
        return of_tensor, ctx.saved_tensors[0].clone(), None


def loads(chosen: Tensor, experts: int) -> Tensor:
    """chosen: [..., n]. How often each expert is, int64 [..., experts]."""
    return chosen.new_zeros(*chosen.shape[:-1], experts).scatter_add_(-1, chosen, torch.ones_like(chosen))


def within_capacity(chosen: Tensor, documents: Tensor | None, experts: int, factor: float) -> Tensor:
    """Which of the assignments [batch, seq, top_k] an expert has room for: of each document (a sequence where there are
    none) the first factor x tokens x top_k / experts, rounded up."""
    batch, seq, top_k = chosen.shape
    places = torch.arange(seq, device=chosen.device)
    begins = (places == 0).expand(batch, seq)
    if documents is not None:
        begins = begins | (documents != documents.roll(1, 1))
    number = begins.cumsum(1) - 1  # of the document in its sequence
    tokens = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number)).gather(1, number)
    first = torch.where(begins, places, 0).cummax(1).values
    assigned = chosen.new_zeros(batch, seq, experts).scatter_(2, chosen, 1)
    earlier = assigned.cumsum(1) - assigned
    earlier = earlier - earlier.gather(1, first.unsqueeze(-1).expand(-1, -1, experts))
    capacity = (tokens.double() * top_k * factor / experts).ceil()
    return earlier.gather(2, chosen) < capacity.unsqueeze(-1)


class Experts(nn.Module):
    """Feed-forward layers without biases, the weights of all in one parameter for each matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, dim, hidden = config.moe.experts, config.dim, config.expert_dim
        self.number = experts
        self.kind = config.ffn
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim)) if config.gated else None
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        matrix = Spec(Role.matrix, config.init_std)
        specify(self, gate=matrix, up=matrix, down=Spec(Role.matrix, config.residual_std))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [n, dim], those of the first expert first; counts: int64 [experts], which may be 0. Returns the shape
        of rows."""
        return self.apply_weights(rows, counts, self.gate, self.up, self.down)

    def apply_weights(self, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        """The same with these weights, of as many experts as there are counts."""
        gates = None if gate is None else grouped_product(rows, gate, counts)
        return self.contract(grouped_product(rows, up, counts), gates, counts, down)

    def contract(self, hidden: Tensor, gates: Tensor | None, counts: Tensor, down: Tensor) -> Tensor:
        """The second half, after the products that widen. hidden, gates: [n, hidden]."""
        hidden = activated(self.kind, hidden) if gates is None else activated(self.kind, gates) * hidden
        return grouped_product(hidden, down, counts)


class Dispatcher(nn.Module):
    """Takes rows to their experts and back, a child without parameters. What has experts elsewhere, such as expert
    parallelism, replaces it."""

    def forward(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [n, dim], those for the first expert first; counts: int64 [experts]. Returns the shape of rows."""
        found: Tensor = experts(rows, counts)
        return found


def permuted(x: Tensor, taken: Tensor, back: Tensor) -> Tensor:
    """The rows x[taken], each of x equally often; `back`: where the rows of x went, those of the first row first."""
    found: Tensor = _Rows.apply(x, taken, back)
    return found


class _Rows(torch.autograd.Function):
    """The rows x[taken], each of x equally often. Backward gathers too, where indexing would scatter and so add up in
    any order: `back` says of each row of x where it went, and then of the next row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.each = x.shape[0], taken.shape[0] // max(x.shape[0], 1)  # both 0 where no token comes
        return x.index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, ctx.each).sum(1), None, None


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [n, in] times weights [experts, out, in], each row with its expert's: [n, out]."""
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in weights.shape[1:])
    # In a graph torch 2.11 has grouped_mm for bf16 alone.
    known = rows.dtype is torch.bfloat16 if torch.compiler.is_compiling() else rows.dtype is not torch.float64
    if aligned and known:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    return looped_product(rows, weights, counts)


@torch.library.custom_op("espalier::looped_product", mutates_args=())
def looped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_product` for what grouped_mm has no kernel for: expert by expert, waiting for the counts. An operator,
    so that a graph that is compiled can hold it."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])


@torch.library.custom_op("espalier::looped_outer", mutates_args=())
def looped_outer(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The gradient of the weights: [experts, out, in], 0 where an expert has no rows."""
    sizes = counts.tolist()
    return torch.stack([of.T @ part for of, part in zip(gradient.split(sizes), rows.split(sizes), strict=True)])


@looped_product.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@looped_outer.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], gradient.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    of_rows = looped_product(gradient, weights.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    of_weights = looped_outer(gradient, rows, counts) if ctx.needs_input_grad[1] else None
    return of_rows, of_weights, None


looped_product.register_autograd(_backward, setup_context=_save)


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def share_losses(model: nn.Module, predicted: Tensor) -> None:
    """Before the passes of a step: what its auxiliary losses are divided by, as its token losses are."""
    for router in routers(model):
        router.share.copy_(1 / predicted)


@torch.no_grad()
def load_statistics(model: nn.Module) -> Tensor | None:
    """Of a step's counts, before `balance`: the largest load over the mean and the negative of the smallest, of any
    router; the sums over routers of the coefficient of variation and of the share of dropped assignments. None without
    routers."""
    found = routers(model)
    counts = [router.load.grad for router in found if router.load.grad is not None]
    if not counts:
        return None
    loads = torch.stack(counts)
    relative = loads / loads.mean(1, keepdim=True)
    dropped = [router.dropped.grad for router in found if router.dropped.grad is not None]
    counted = torch.cat(dropped) if dropped else torch.zeros_like(loads[:, 0])
    deviations = relative.std(1, correction=0).sum()
    return torch.stack([relative.max(), -relative.min(), deviations, (counted / loads.sum(1)).sum()])


@torch.no_grad()
def balance(model: nn.Module, skipped: Tensor) -> None:
    """After a step: its counts become the load, and biases are moved by them. skipped: 1 where the step changed
    nothing."""
    for router in routers(model):
        assert router.load.grad is not None
        counts = router.load.grad
        router.load.copy_(torch.where(skipped > 0, router.load, counts))
        if router.moe.bias_rate > 0:
            wide = counts.double()
            router.bias.add_(router.moe.bias_rate * (wide.mean() - wide).sign() * (1 - skipped))
