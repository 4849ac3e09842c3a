"""The parameters of a model by name and shape, for plans. No torch here, unless a part is the user's own."""

from models.config import ModelConfig, Norm, NormPlace, Position, QKNorm
from models.parts import part_shapes

Shapes = dict[str, tuple[int, ...]]


def in_router(name: str) -> bool:
    return ".router." in name


def in_experts(name: str) -> bool:
    return ".experts." in name


def is_learned(name: str) -> bool:
    """Not so what a router counts and the bias it sets by that."""
    return not in_router(name) or name.endswith(".weight")


def is_table(name: str) -> bool:
    """A row for each token of the vocabulary, or for each position."""
    return name.startswith(("embed.", "values.", "head."))


def has_gradient(name: str, config: ModelConfig) -> bool:
    """Counts come as gradients too (models.moe.Router), those of dropped assignments where there is a capacity."""
    constant = (".router.bias",) if config.moe.capacity_factor is not None else (".router.bias", ".router.dropped")
    return not name.endswith(constant)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _rms_norm(name: str, width: int, config: ModelConfig) -> Shapes:
    return {f"{name}.weight": (width,)} if config.norm_weight else {}


def _norm(name: str, config: ModelConfig) -> Shapes:
    weight: Shapes = {f"{name}.weight": (config.dim,)} if config.norm_weight else {}
    biased = config.bias and config.norm_weight and config.norm is Norm.layernorm
    return weight | ({f"{name}.bias": (config.dim,)} if biased else {})


def block_shapes(config: ModelConfig, layer: int) -> Shapes:
    """The parameters of one block, in the module's order, which is that of their use in forward."""
    mixed = ["x0"] * config.x0 + ["skip"] * config.takes_skip(layer)
    shapes: Shapes = {f"mix.{name}": (1,) for name in ["x", *mixed]} if mixed else {}
    attention = part_shapes(config, "attention", layer)
    if attention is None:
        attention = _latent(config) if config.latent.kv_rank > 0 else _attention(config, layer)
    parts = {"attention": attention, "feedforward": _feedforward_part(config, layer)}
    for part, of_part in parts.items():
        shapes |= _norm(f"{part}_norm", config) if config.norm_place is not NormPlace.after else {}
        shapes |= of_part
        shapes |= _norm(f"{part}_post_norm", config) if config.norm_place is not NormPlace.before else {}
    return shapes


def _attention(config: ModelConfig, layer: int) -> Shapes:
    dim, queries, keys = config.dim, config.query_dim, config.key_value_dim
    widths = {"qkv": queries + 2 * keys} if config.fused_qkv else {"q": queries, "k": keys, "v": keys}
    shapes: Shapes = {}
    for name, rows in widths.items():
        shapes |= _linear(f"attention.{name}", rows, dim, config.has_qkv_bias)
    if config.qk_norm is not QKNorm.none and config.norm_weight:
        of_all = config.qk_norm is QKNorm.all
        shapes["attention.q_norm.weight"] = (queries if of_all else config.head_size,)
        shapes["attention.k_norm.weight"] = (keys if of_all else config.head_size,)
    if config.value_table(layer) is not None:
        shapes |= {"attention.mix.own": (1,), "attention.mix.embedding": (1,)}
    return shapes | _linear("attention.out", dim, queries, config.bias)


def _latent(config: ModelConfig) -> Shapes:
    dim, heads, latent = config.dim, config.heads, config.latent
    if latent.q_rank is None:
        shapes = _linear("attention.q", config.query_dim, dim, config.has_qkv_bias)
    else:
        shapes = _linear("attention.q_down", latent.q_rank, dim, config.has_qkv_bias)
        shapes |= _rms_norm("attention.q_norm", latent.q_rank, config)
        shapes |= _linear("attention.q_up", config.query_dim, latent.q_rank, False)
    shapes |= _linear("attention.kv_down", latent.kv_rank + latent.rope_dim, dim, config.has_qkv_bias)
    shapes |= _rms_norm("attention.kv_norm", latent.kv_rank, config)
    shapes |= _linear("attention.kv_up", heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, False)
    return shapes | _linear("attention.out", dim, heads * latent.value_dim, config.bias)


def _feedforward_part(config: ModelConfig, layer: int) -> Shapes:
    if config.routed(layer):
        return _experts_shapes(config)
    own = part_shapes(config, "feedforward", layer)
    return _feedforward("feedforward", config.feedforward_dim, config) if own is None else own


def _feedforward(name: str, width: int, config: ModelConfig) -> Shapes:
    shapes: Shapes = {}
    for part in ["gate", "up"] if config.gated else ["up"]:
        shapes |= _linear(f"{name}.{part}", width, config.dim, config.bias)
    return shapes | _linear(f"{name}.down", config.dim, width, config.bias)


def _experts_shapes(config: ModelConfig) -> Shapes:
    """What is only counted, loads and drops, and the bias of the choice are parameters too."""
    moe, dim, hidden = config.moe, config.dim, config.expert_dim
    shapes: Shapes = {
        "feedforward.router.weight": (moe.experts, dim),
        "feedforward.router.load": (moe.experts,),
        "feedforward.router.bias": (moe.experts,),
        "feedforward.router.dropped": (1,),
    }
    for part in ["gate", "up"] if config.gated else ["up"]:
        shapes[f"feedforward.experts.{part}"] = (moe.experts, hidden, dim)
    shapes["feedforward.experts.down"] = (moe.experts, dim, hidden)
    return shapes | (_feedforward("feedforward.shared", moe.shared * hidden, config) if moe.shared else {})


def _first_shapes(config: ModelConfig) -> Shapes:
    """With the vocabulary's padding; a tied head is the embedding's."""
    rows = config.padded_vocab_size
    tables: Shapes = {"embed.tokens.weight": (rows, config.dim)}
    if config.position is Position.learned:
        tables["embed.positions.weight"] = (config.context, config.dim)
    values = range(config.value_embeddings)
    return tables | {f"values.{layer}.table.weight": (rows, config.key_value_dim) for layer in values}


def _last_shapes(config: ModelConfig) -> Shapes:
    head: Shapes = {} if config.tied_head else {"head.weight": (config.padded_vocab_size, config.dim)}
    return _norm("norm", config) | head


def _further_shapes(config: ModelConfig) -> Shapes:
    """Of what predicts further tokens; its embedding and head are the model's."""
    shapes: Shapes = {}
    for number in range(config.mtp):
        step = f"mtp.steps.{number}"
        shapes |= _norm(f"{step}.token_norm", config) | _norm(f"{step}.stream_norm", config)
        shapes |= _linear(f"{step}.join", config.dim, 2 * config.dim, False)
        block = block_shapes(config, config.layers + number)
        shapes |= {f"{step}.block.{name}": shape for name, shape in block.items()} | _norm(f"{step}.norm", config)
    return shapes


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Every parameter of the Decoder, a shared one once, in the order of named_parameters."""
    shapes = _first_shapes(config)
    for layer in range(config.layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block_shapes(config, layer).items()}
    return shapes | _last_shapes(config) | _further_shapes(config)
