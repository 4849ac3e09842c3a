"""A decoder and its parts, written out from their papers in plain PyTorch: what `oracle` trains.

It shares no code with models/. Only the names and the order of the query, key and value rows are those of models/, so
that weights and gradients can be compared.
"""

import math
from dataclasses import dataclass

import torch
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
    forced: bool = False  # the tokens of each sequence go to experts in turn


@dataclass(frozen=True)
class Rotary:
    """scaling: none, linear, llama3 or yarn; original: positions the speeds were made for; low, high, fast, slow: turns
    in these; windows: whether blocks with a window are scaled too."""

    theta: float
    original: int
    share: float = 1.0
    scaling: str = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float | None = None
    windows: bool = True


@dataclass(frozen=True)
class Shape:
    """norm: layernorm or rmsnorm, in its place before, after or both; qk_norm: none, head or all; ffn: gelu, relu2,
    swiglu or geglu; residual: scaled, same or zero."""

    layers: int
    dim: int
    heads: int
    ffn_dim: int
    context: int
    vocab_size: int
    tied: bool
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    fused: bool = True
    ffn: str = "gelu"
    norm: str = "layernorm"
    norm_place: str = "before"
    norm_weight: bool = True
    norm_eps: float = 1e-5
    qk_norm: str = "none"
    learned_positions: bool = True
    rotary: Rotary | None = None
    window: int | None = None
    full_every: int = 0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    softcap: float | None = None
    z_loss: float = 0.0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    std: float = 0.02
    residual: str = "scaled"
    embedding_std: float | None = None
    x0: bool = False
    skips: bool = False
    value_tables: int = 0
    experts: Experts | None = None
    mup_dim: int | None = None  # maximal update parametrization: the widths of the model and of a head at its base
    mup_head: int | None = None

    @property
    def mup_width(self) -> float:
        """How much wider than the base."""
        return 1.0 if self.mup_dim is None else self.dim / self.mup_dim

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def gated(self) -> bool:
        return self.ffn in ("swiglu", "geglu")

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

    def window_of(self, layer: int) -> int | None:
        """With full_every of 3 the third, sixth ... layer has none."""
        return self.window if self.full_every == 0 or layer % self.full_every != self.full_every - 1 else None


# ---- the parameters


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and unpadded sizes."""
    dim, keys = shape.dim, shape.groups * shape.width
    shapes: dict[str, tuple[int, ...]] = {"embed.tokens.weight": (shape.vocab_size, dim)}
    if shape.learned_positions:
        shapes["embed.positions.weight"] = (shape.context, dim)
    for number in range(shape.value_tables):
        shapes[f"values.{number}.table.weight"] = (shape.vocab_size, keys)
    for layer in range(shape.layers):
        parts = {
            **mix_shapes(shape, layer),
            **norm_shapes(shape, "attention"),
            **attention_shapes(shape),
            **norm_shapes(shape, "feedforward"),
            **feedforward_shapes(shape, layer),
            **experts_shapes(shape, layer),
        }
        shapes |= {f"blocks.{layer}.{name}": size for name, size in parts.items()}
    shapes |= one_norm(shape, "norm")
    if not shape.tied:
        shapes["head.weight"] = (shape.vocab_size, dim)
    return shapes


def mix_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    skipped = shape.skip_to(layer) is not None
    names = ["mix.x"] * (shape.x0 or skipped) + ["mix.x0"] * shape.x0 + ["mix.skip"] * skipped
    names += ["attention.mix.own", "attention.mix.embedding"] * (shape.table_of(layer) is not None)
    return dict.fromkeys(names, (1,))


def one_norm(shape: Shape, name: str) -> dict[str, tuple[int, ...]]:
    parts = ["weight"] * shape.norm_weight
    parts += ["bias"] * (shape.norm_weight and shape.bias and shape.norm == "layernorm")
    return {f"{name}.{part}": (shape.dim,) for part in parts}


def norm_shapes(shape: Shape, part: str) -> dict[str, tuple[int, ...]]:
    before = one_norm(shape, f"{part}_norm") if shape.norm_place in ("before", "both") else {}
    return before | (one_norm(shape, f"{part}_post_norm") if shape.norm_place in ("after", "both") else {})


def one_linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def attention_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.width, shape.groups * shape.width
    bias = shape.bias if shape.qkv_bias is None else shape.qkv_bias
    rows = {"qkv": queries + 2 * keys} if shape.fused else {"q": queries, "k": keys, "v": keys}
    shapes = one_linear("attention.out", shape.dim, queries, shape.bias)
    for name, number in rows.items():
        shapes |= one_linear(f"attention.{name}", number, shape.dim, bias)
    if shape.qk_norm != "none" and shape.norm_weight:
        for name, width in (("q", queries), ("k", keys)):
            shapes[f"attention.{name}_norm.weight"] = (width if shape.qk_norm == "all" else shape.width,)
    return shapes


def feedforward_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Of the layer every token goes to: where there are experts that is the shared ones', if there are any."""
    name, width = "feedforward", shape.ffn_dim
    if (experts := shape.experts_of(layer)) is not None:
        name, width = "feedforward.shared", experts.shared * experts.hidden
    if width == 0:
        return {}
    gate = one_linear(f"{name}.gate", width, shape.dim, shape.bias) if shape.gated else {}
    up, down = f"{name}.up", f"{name}.down"
    return gate | one_linear(up, width, shape.dim, shape.bias) | one_linear(down, shape.dim, width, shape.bias)


def experts_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    if (experts := shape.experts_of(layer)) is None:
        return {}
    number, hidden, name = experts.number, experts.hidden, "feedforward"
    gate = {f"{name}.experts.gate": (number, hidden, shape.dim)} if shape.gated else {}
    return gate | {
        f"{name}.experts.up": (number, hidden, shape.dim),
        f"{name}.experts.down": (number, shape.dim, hidden),
        f"{name}.router.weight": (number, shape.dim),
        f"{name}.router.load": (number,),
        f"{name}.router.bias": (number,),
        f"{name}.router.dropped": (1,),
    }


# ---- the parts


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activated(x: Tensor, kind: str) -> Tensor:
    if kind == "relu2":
        return x.clamp(min=0) ** 2
    return x / (1 + torch.exp(-x)) if kind == "swiglu" else gelu(x)


def bent(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def normed(x: Tensor, name: str, weights: Weights, shape: Shape) -> Tensor:
    if shape.norm == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        x = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + shape.norm_eps)
    else:
        x = rms(x, shape.norm_eps)
    return x * weights.get(f"{name}.weight", 1) + weights.get(f"{name}.bias", 0)


def linear(x: Tensor, name: str, weights: Weights) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def feedforward(x: Tensor, name: str, weights: Weights, kind: str) -> Tensor:
    if f"{name}.gate.weight" in weights:
        hidden = activated(linear(x, f"{name}.gate", weights), kind) * linear(x, f"{name}.up", weights)
    else:
        hidden = activated(linear(x, f"{name}.up", weights), kind)
    return linear(hidden, f"{name}.down", weights)


def turns(rotary: Rotary, width: int, windowed: bool) -> tuple[list[float], float]:
    """Radians a position of each pair, and what turned numbers are multiplied by."""
    pairs = int(width * rotary.share) // 2
    speeds = [1 / rotary.theta ** (2 * pair / (2 * pairs)) for pair in range(pairs)]
    factor, original = rotary.factor, rotary.original
    if rotary.scaling == "none" or (windowed and not rotary.windows):
        return speeds, 1.0
    if rotary.scaling == "linear":
        return [speed / factor for speed in speeds], 1.0
    if rotary.scaling == "llama3":  # by wavelength, as the code that came with Llama 3.1
        found = []
        for speed in speeds:
            wave = 2 * math.pi / speed
            smooth = (original / wave - rotary.low) / (rotary.high - rotary.low)
            if wave < original / rotary.high:
                found.append(speed)
            elif wave > original / rotary.low:
                found.append(speed / factor)
            else:
                found.append((1 - smooth) * speed / factor + smooth * speed)
        return found, 1.0
    # YaRN (Peng et al. 2023): interpolated more and more between the pairs that turn `fast` and `slow` times
    of_pair = [pairs * math.log(original / (2 * math.pi * turn), rotary.theta) for turn in (rotary.fast, rotary.slow)]
    first, last = max(math.floor(of_pair[0]), 0), min(math.ceil(of_pair[1]), 2 * pairs - 1)
    slowed = [min(max((pair - first) / (last - first), 0), 1) for pair in range(pairs)]
    magnitude = 1 + 0.1 * math.log(factor) if rotary.magnitude is None else rotary.magnitude
    return [speed * (1 - share + share / factor) for speed, share in zip(speeds, slowed, strict=True)], magnitude


def rotated(x: Tensor, rotary: Rotary, windowed: bool) -> Tensor:
    """x: [batch, seq, width]: numbers i and i + half as a complex one, times e^(i angle)."""
    speeds, magnitude = turns(rotary, x.shape[-1], windowed)
    half = len(speeds)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor(speeds, dtype=x.dtype)
    number = torch.complex(x[..., :half], x[..., half : 2 * half])
    number = number * torch.polar(torch.full_like(angles, magnitude), angles)
    return torch.cat([number.real, number.imag, x[..., 2 * half :]], dim=-1)


# ---- attention


Heads = list[Tensor]  # each [batch, seq, width]


def queries_keys_values(x: Tensor, name: str, weights: Weights, shape: Shape) -> tuple[Heads, Heads, Heads]:
    """Of each head, and of each group. Rows of qkv: the queries of a group's heads, its keys, its values, the next
    group's."""
    width, shared = shape.width, shape.heads // shape.groups
    if not shape.fused:
        q, k, v = (list(linear(x, f"{name}.{part}", weights).split(width, dim=-1)) for part in "qkv")
        return q, k, v
    parts = linear(x, f"{name}.qkv", weights).split(width, dim=-1)
    groups = [parts[start : start + shared + 2] for start in range(0, len(parts), shared + 2)]
    q = [head for group in groups for head in group[:shared]]
    return q, [group[shared] for group in groups], [group[shared + 1] for group in groups]


def normed_heads(heads: Heads, name: str, weights: Weights, shape: Shape) -> Heads:
    weight = weights.get(f"{name}.weight", 1)
    if shape.qk_norm == "head":
        return [rms(head, shape.norm_eps) * weight for head in heads]
    return list((rms(torch.cat(heads, dim=-1), shape.norm_eps) * weight).split(shape.width, dim=-1))


def attention(x: Tensor, tokens: Tensor, layer: int, weights: Weights, shape: Shape) -> Tensor:
    name, window = f"blocks.{layer}.attention", shape.window_of(layer)
    q, k, v = queries_keys_values(x, name, weights, shape)
    if shape.qk_norm != "none":
        q, k = normed_heads(q, f"{name}.q_norm", weights, shape), normed_heads(k, f"{name}.k_norm", weights, shape)
    if shape.rotary is not None:
        q, k = ([rotated(head, shape.rotary, window is not None) for head in heads] for heads in (q, k))
    if (number := shape.table_of(layer)) is not None:
        vectors = weights[f"values.{number}.table.weight"][tokens].split(shape.width, dim=-1)
        own, embedding = weights[f"{name}.mix.own"], weights[f"{name}.mix.embedding"]
        v = [own * value + embedding * vector for value, vector in zip(v, vectors, strict=True)]
    back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    hidden = (back < 0) | (back >= (x.shape[1] if window is None else window))
    sharpness = 1 / math.sqrt(shape.width) if shape.mup_head is None else math.sqrt(shape.mup_head) / shape.width
    scale = sharpness if shape.attention_scale is None else shape.attention_scale
    attended = []
    for head, query in enumerate(q):
        group = head * shape.groups // shape.heads
        scores = bent(scale * query @ k[group].transpose(1, 2), shape.attention_softcap)
        attended.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[group])
    return linear(torch.cat(attended, dim=-1), f"{name}.out", weights)


# ---- experts


@dataclass
class Routing:
    """What the routers of a forward pass did. loss: the sum of their auxiliary losses; counts: tokens of each expert,
    by the name of the router."""

    loss: Tensor
    counts: Weights
    margin: float


def experts_of_tokens(x: Tensor, name: str, weights: Weights, experts: Experts, kind: str, routing: Routing) -> Tensor:
    """Every expert on every token, and the sum of those that were chosen. x: [batch, seq, dim]."""
    number, top_k = experts.number, experts.top_k
    logits = x @ weights[f"{name}.router.weight"].T
    scores = 1 / (1 + torch.exp(-logits)) if experts.sigmoid else logits.softmax(-1)
    preferred = (scores.detach() + weights[f"{name}.router.bias"]).tolist()
    chosen = torch.zeros(*logits.shape, dtype=x.dtype)
    for row, sequence in enumerate(preferred):
        for place, token in enumerate(sequence):
            ranked = sorted(range(number), key=lambda expert: (-token[expert], expert))
            if experts.forced:
                ranked = [(place * top_k + turn) % number for turn in range(top_k)]
            chosen[row, place, ranked[:top_k]] = 1
            if top_k < number and not experts.forced:
                routing.margin = min(routing.margin, token[ranked[top_k - 1]] - token[ranked[top_k]])
    shares = scores * chosen
    if experts.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in range(number):
        own = {
            f"expert.{part}.weight": weights[f"{name}.experts.{part}"][expert]
            for part in ("gate", "up", "down")
            if f"{name}.experts.{part}" in weights
        }
        total = total + experts.scale * shares[..., expert : expert + 1] * feedforward(x, "expert", own, kind)

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


# ---- the whole


def logits(weights: Weights, shape: Shape, tokens: Tensor) -> tuple[Tensor, Routing]:
    """tokens [batch, seq] to scores [batch, seq, vocabulary]."""
    routing = Routing(torch.zeros(()), {}, math.inf)
    x = shape.embedding_scale * weights["embed.tokens.weight"][tokens]
    if shape.learned_positions:
        x = x + weights["embed.positions.weight"][: tokens.shape[1]]
    x = x0 = rms(x, shape.norm_eps) if shape.embedding_norm else x
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
        for part in ("attention", "feedforward"):
            name = f"{block}.{part}"
            y = normed(x, f"{name}_norm", weights, shape) if shape.norm_place in ("before", "both") else x
            if part == "attention":
                y = attention(y, tokens, layer, weights, shape)
            elif (experts := shape.experts_of(layer)) is None:
                y = feedforward(y, name, weights, shape.ffn)
            else:
                shared = feedforward(y, f"{name}.shared", weights, shape.ffn) if experts.shared else 0
                y = experts_of_tokens(y, name, weights, experts, shape.ffn, routing) + shared
            x = x + (normed(y, f"{name}_post_norm", weights, shape) if shape.norm_place in ("after", "both") else y)
        outputs.append(x)
    head = weights["embed.tokens.weight" if shape.tied else "head.weight"]
    return bent(normed(x, "norm", weights, shape) @ head.T / shape.mup_width, shape.softcap), routing
