"""What every layout must equal: a GPT-2 and its training, written out in plain PyTorch on one process.

It shares no code with models/, parallel/ or training/, and does everything in the plainest way: the whole global batch
at once, attention as matrix products with a mask, one mean over all predicted tokens, one clip, one step of
torch.optim. Only the names and the order of the query, key and value rows are those of models/, so that weights and
gradients can be compared.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Experts:
    """Of the layers from dense_layers on. balance: none, sequence or step."""

    number: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    balance: str = "none"
    balance_weight: float = 0.0
    bias_rate: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    heads: int
    ffn_dim: int
    context: int
    vocab_size: int
    tied: bool
    kv_heads: int | None = None
    bias: bool = True
    fused: bool = True
    softcap: float | None = None
    z_loss: float = 0.0
    x0: bool = False
    skips: bool = False
    value_tables: int = 0
    experts: Experts | None = None

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    def table_of(self, layer: int) -> int | None:
        """The number of a layer's table for values: the first layers have one each, and the last the same again."""
        numbers = list(range(self.value_tables))
        return (numbers + [None] * (self.layers - 2 * len(numbers)) + numbers)[layer]

    def experts_of(self, layer: int) -> Experts | None:
        return None if self.experts is None or layer < self.experts.dense_layers else self.experts

    def skip_to(self, layer: int) -> int | None:
        """The layer whose output is added before this one: of 5 layers the first's to the last, the second's to the
        fourth."""
        return self.layers - 1 - layer if self.skips and layer >= (self.layers + 1) // 2 else None


@dataclass(frozen=True)
class Batch:
    """tokens, labels: int64 [sequences, seq]; labels of -100 are not predicted."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Recipe:
    """optimizer: adamw, or sgd whose momentum is beta1."""

    optimizer: str
    lrs: tuple[float, ...]
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float | None


@dataclass
class Trajectory:
    """One entry a step; gradients are those before clipping, token_losses those of the weights before the step. The
    gradient of a router's load is the number of tokens of the step.

    margin: the smallest by which an expert was preferred to one that was not chosen."""

    initial: Weights
    losses: list[float]
    predicted: list[int]
    norms: list[float]
    gradients: list[Weights]
    token_losses: list[Tensor]
    final: Weights
    margin: float = math.inf


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and unpadded sizes."""
    dim = shape.dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed.tokens.weight": (shape.vocab_size, dim),
        "embed.positions.weight": (shape.context, dim),
    }
    for number in range(shape.value_tables):
        shapes[f"values.{number}.table.weight"] = (shape.vocab_size, shape.groups * (dim // shape.heads))
    for layer in range(shape.layers):
        block = f"blocks.{layer}"
        if shape.table_of(layer) is not None:
            shapes |= {f"{block}.attention.mix.own": (1,), f"{block}.attention.mix.embedding": (1,)}
        if shape.x0 or shape.skip_to(layer) is not None:
            shapes[f"{block}.mix.x"] = (1,)
        if shape.x0:
            shapes[f"{block}.mix.x0"] = (1,)
        if shape.skip_to(layer) is not None:
            shapes[f"{block}.mix.skip"] = (1,)
        for name, size in {
            "attention_norm": (dim,),
            **attention_shapes(shape),
            "attention.out": (dim, dim),
            "feedforward_norm": (dim,),
            **feedforward_shapes(shape, layer),
        }.items():
            shapes[f"{block}.{name}.weight"] = size
            shapes[f"{block}.{name}.bias"] = (size[0],)
        if (experts := shape.experts_of(layer)) is not None:
            number, hidden, name = experts.number, experts.hidden, f"{block}.feedforward"
            shapes |= {f"{name}.experts.up": (number, hidden, dim), f"{name}.experts.down": (number, dim, hidden)}
            shapes |= {f"{name}.router.weight": (number, dim), f"{name}.router.load": (number,)}
            shapes |= {f"{name}.router.bias": (number,), f"{name}.router.dropped": (1,)}
    shapes["norm.weight"] = shapes["norm.bias"] = (dim,)
    if not shape.bias:
        shapes = {name: size for name, size in shapes.items() if not name.endswith("bias") or "router" in name}
    if not shape.tied:
        shapes["head.weight"] = (shape.vocab_size, dim)
    return shapes


def feedforward_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Of the layer every token goes to: where there are experts that is the shared ones', if there are any."""
    name, width = "feedforward", shape.ffn_dim
    if (experts := shape.experts_of(layer)) is not None:
        name, width = "feedforward.shared", experts.shared * experts.hidden
    return {f"{name}.up": (width, shape.dim), f"{name}.down": (shape.dim, width)} if width else {}


def attention_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    keys = shape.groups * (shape.dim // shape.heads)
    if shape.fused:
        return {"attention.qkv": (shape.dim + 2 * keys, shape.dim)}
    return {"attention.q": (shape.dim, shape.dim), "attention.k": (keys, shape.dim), "attention.v": (keys, shape.dim)}


# What the numbers of a weighted sum begin with.
MIXES = {"x": 1.0, "x0": 0.0, "skip": 1.0, "own": 0.5, "embedding": 0.5}


def initial_weights(shape: Shape, seed: int, dtype: torch.dtype) -> Weights:
    """GPT-2's: normal with std 0.02, divided by sqrt(2 x layers) into the residual stream; biases 0, norms 1. Each
    parameter is drawn in float32 in blocks of 1,024 rows, or of one expert, from a generator seeded by the hash of
    (seed, name, block)."""
    weights = {}
    for name, size in parameter_shapes(shape).items():
        if name.endswith(("bias", ".load", ".dropped")):
            values = torch.zeros(size)
        elif "norm" in name:
            values = torch.ones(size)
        elif ".mix." in name:
            values = torch.full(size, MIXES[name.rpartition(".")[2]])
        else:
            residual = "attention.out." in name or ".down" in name
            std = 0.02 / math.sqrt(2 * shape.layers) if residual else 0.02
            blocks, each = [], 1 if len(size) == 3 else 1024
            for block, first in enumerate(range(0, size[0], each)):
                generator = torch.Generator().manual_seed(_hash(seed, name, block))
                blocks.append(torch.randn(min(each, size[0] - first), *size[1:], generator=generator) * std)
            values = torch.cat(blocks)
        weights[name] = values.to(dtype)
    return weights


def _hash(seed: int, name: str, block: int) -> int:
    """63 bits of blake2b over the parts with their types."""
    text = f"int:{seed}\x1fstr:{name}\x1fint:{block}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") // 2


@dataclass
class Routing:
    """What the routers of a forward pass did. loss: the sum of their auxiliary losses; counts: tokens of each expert,
    by the name of the router."""

    loss: Tensor
    counts: Weights
    margin: float


def experts_of_tokens(x: Tensor, name: str, weights: Weights, experts: Experts, routing: Routing) -> Tensor:
    """Every expert on every token, and the sum of those that were chosen. x: [batch, seq, dim]."""
    number, top_k = experts.number, experts.top_k
    logits = x @ weights[f"{name}.router.weight"].T
    scores = 1 / (1 + torch.exp(-logits)) if experts.sigmoid else logits.softmax(-1)
    preferred = (scores.detach() + weights[f"{name}.router.bias"]).tolist()
    chosen = torch.zeros(*logits.shape, dtype=x.dtype)
    for row, sequence in enumerate(preferred):
        for place, token in enumerate(sequence):
            ranked = sorted(range(number), key=lambda expert: (-token[expert], expert))
            chosen[row, place, ranked[:top_k]] = 1
            if top_k < number:
                routing.margin = min(routing.margin, token[ranked[top_k - 1]] - token[ranked[top_k]])
    shares = scores * chosen
    if experts.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in range(number):
        hidden = gelu(x @ weights[f"{name}.experts.up"][expert].T) @ weights[f"{name}.experts.down"][expert].T
        total = total + experts.scale * shares[..., expert : expert + 1] * hidden

    length = x.shape[1]
    probabilities = scores / scores.sum(-1, keepdim=True)
    if experts.balance == "sequence":
        for row in range(len(x)):  # DeepSeek-V3, equations 17 to 20, times the tokens of the sequence
            frequency = number / (top_k * length) * chosen[row].sum(0)
            mean = probabilities[row].sum(0) / length
            routing.loss = routing.loss + experts.balance_weight * (frequency * mean).sum() * length
    if experts.balance == "step" and (load := weights[f"{name}.router.load"]).sum() > 0:
        frequency = number * load / load.sum()
        routing.loss = routing.loss + experts.balance_weight * (frequency * probabilities.sum((0, 1))).sum()
    routing.loss = routing.loss + experts.z_loss * (torch.exp(logits).sum(-1).log() ** 2).sum()
    routing.counts[f"{name}.router"] = chosen.sum((0, 1))
    return total


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(weights: Weights, shape: Shape, tokens: Tensor) -> tuple[Tensor, Routing]:
    """tokens [batch, seq] to scores [batch, seq, vocabulary]."""
    routing = Routing(torch.zeros(()), {}, math.inf)
    _, seq = tokens.shape
    head_dim = shape.dim // shape.heads
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def queries_keys_values(x: Tensor, name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """One triple a head. Rows of qkv: the queries of a group's heads, its keys, its values, the next group's."""
        size, shared = head_dim, shape.heads // shape.groups
        if not shape.fused:
            q, k, v = (linear(x, f"{name}.{part}").split(size, dim=-1) for part in "qkv")
            return [(q[head], k[head // shared], v[head // shared]) for head in range(shape.heads)]
        parts = linear(x, f"{name}.qkv").split(size, dim=-1)
        first = [head // shared * (shared + 2) for head in range(shape.heads)]
        return [
            (parts[start + head % shared], parts[start + shared], parts[start + shared + 1])
            for head, start in enumerate(first)
        ]

    def mixed_value(v: Tensor, layer: int, group: int) -> Tensor:
        if (number := shape.table_of(layer)) is None:
            return v
        vectors = weights[f"values.{number}.table.weight"][tokens].split(head_dim, dim=-1)[group]
        mix = f"blocks.{layer}.attention.mix"
        return weights[f"{mix}.own"] * v + weights[f"{mix}.embedding"] * vectors

    x = x0 = weights["embed.tokens.weight"][tokens] + weights["embed.positions.weight"][:seq]
    outputs: list[Tensor] = []
    for layer in range(shape.layers):
        block = f"blocks.{layer}"
        skip = shape.skip_to(layer)
        if shape.x0 or skip is not None:
            x = weights[f"{block}.mix.x"] * x
        if shape.x0:
            x = x + weights[f"{block}.mix.x0"] * x0
        if skip is not None:
            x = x + weights[f"{block}.mix.skip"] * outputs[skip]
        heads = []
        triples = queries_keys_values(norm(x, f"{block}.attention_norm"), f"{block}.attention")
        for head, (q, k, own) in enumerate(triples):
            v = mixed_value(own, layer, head * shape.groups // shape.heads)
            scores = (q @ k.transpose(1, 2) / math.sqrt(head_dim)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, dim=-1), f"{block}.attention.out")
        normalized, name = norm(x, f"{block}.feedforward_norm"), f"{block}.feedforward"
        if (experts := shape.experts_of(layer)) is not None:
            x = x + experts_of_tokens(normalized, name, weights, experts, routing)
            name = f"{name}.shared"
        if f"{name}.up.weight" in weights:
            x = x + linear(gelu(linear(normalized, f"{name}.up")), f"{name}.down")
        outputs.append(x)
    scores = norm(x, "norm") @ weights["embed.tokens.weight" if shape.tied else "head.weight"].T
    return (scores if shape.softcap is None else shape.softcap * torch.tanh(scores / shape.softcap)), routing


BALANCE = (".router.load", ".router.bias", ".router.dropped")  # set by counts, not learned


def train(shape: Shape, seed: int, dtype: torch.dtype, batches: list[Batch], recipe: Recipe) -> Trajectory:
    """One step a batch, the loss a mean over all its predicted tokens."""
    initial = initial_weights(shape, seed, dtype)
    weights = {name: value.clone() for name, value in initial.items()}
    learned = {name: value.requires_grad_() for name, value in weights.items() if not name.endswith(BALANCE)}
    optimizer = _optimizer(learned, recipe)
    found = Trajectory(initial, [], [], [], [], [], {})
    for batch, lr in zip(batches, recipe.lrs, strict=True):
        scores, routing = logits(weights, shape, batch.tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten())  # the mean over labels that are not -100
        predicted = batch.labels != -100
        squares = torch.where(predicted, scores.logsumexp(-1) ** 2, 0)
        optimizer.zero_grad()
        (loss + (shape.z_loss * squares.sum() + routing.loss) / predicted.sum()).backward()
        gradients = {name: _gradient(value).clone() for name, value in learned.items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        if recipe.clip is not None and norm > recipe.clip:
            for value in learned.values():
                _gradient(value).mul_(recipe.clip / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for router, counts in routing.counts.items():
            assert shape.experts is not None
            weights[f"{router}.load"] = gradients[f"{router}.load"] = counts
            even = batch.tokens.numel() * shape.experts.top_k / shape.experts.number
            weights[f"{router}.bias"] += shape.experts.bias_rate * torch.sign(even - counts)
        found.margin = min(found.margin, routing.margin)
        found.losses.append(loss.item())
        found.predicted.append(int((batch.labels != -100).sum()))
        found.norms.append(norm)
        found.gradients.append(gradients)
        found.token_losses.append(token_losses(scores.detach(), batch.labels))
    found.final = {name: value.detach() for name, value in weights.items()}
    return found


def token_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Each token's loss, 0 where it is not predicted."""
    predicted = labels != -100
    picked = scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(predicted, scores.logsumexp(-1) - picked, 0)


def _optimizer(weights: Weights, recipe: Recipe) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    groups = [
        {"params": [value for value in weights.values() if value.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [value for value in weights.values() if value.ndim == 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adamw":
        betas = (recipe.beta1, recipe.beta2)
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=recipe.eps, foreach=False, fused=False)
    return torch.optim.SGD(groups, lr=0.0, momentum=recipe.beta1, foreach=False, fused=False)


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad
