"""The parameters of a model by name and shape, for plans. No torch here."""

from models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def in_router(name: str) -> bool:
    return ".router." in name


def is_learned(name: str) -> bool:
    """Not so what a router counts and the bias it sets by that."""
    return not in_router(name) or name.endswith(".weight")


def has_gradient(name: str, config: ModelConfig) -> bool:
    """Counts come as gradients too (models.moe.Router), those of dropped assignments where there is a capacity."""
    constant = (".router.bias",) if config.moe.capacity_factor is not None else (".router.bias", ".router.dropped")
    return not name.endswith(constant)


def _linear(name: str, rows: int, columns: int, config: ModelConfig) -> Shapes:
    bias: Shapes = {f"{name}.bias": (rows,)} if config.bias else {}
    return {f"{name}.weight": (rows, columns)} | bias


def _norm(name: str, config: ModelConfig) -> Shapes:
    bias: Shapes = {f"{name}.bias": (config.dim,)} if config.bias else {}
    return {f"{name}.weight": (config.dim,)} | bias


def block_shapes(config: ModelConfig, layer: int) -> Shapes:
    """The parameters of one block, in the module's order, which is that of their use in forward."""
    dim, keys = config.dim, config.key_value_dim
    mixed = ["x0"] * config.x0 + ["skip"] * config.takes_skip(layer)
    shapes: Shapes = {f"mix.{name}": (1,) for name in ["x", *mixed]} if mixed else {}
    shapes |= _norm("attention_norm", config)
    for name, rows in [("qkv", dim + 2 * keys)] if config.fused_qkv else [("q", dim), ("k", keys), ("v", keys)]:
        shapes |= _linear(f"attention.{name}", rows, dim, config)
    if config.value_table(layer) is not None:
        shapes |= {"attention.mix.own": (1,), "attention.mix.embedding": (1,)}
    shapes |= _linear("attention.out", dim, dim, config) | _norm("feedforward_norm", config)
    if config.routed(layer):
        return shapes | _experts_shapes(config)
    return shapes | _feedforward("feedforward", config.feedforward_dim, config)


def _feedforward(name: str, width: int, config: ModelConfig) -> Shapes:
    return _linear(f"{name}.up", width, config.dim, config) | _linear(f"{name}.down", config.dim, width, config)


def _experts_shapes(config: ModelConfig) -> Shapes:
    """What is only counted, loads and drops, and the bias of the choice are parameters too."""
    moe, dim, hidden = config.moe, config.dim, config.expert_dim
    shapes: Shapes = {
        "feedforward.router.weight": (moe.experts, dim),
        "feedforward.router.load": (moe.experts,),
        "feedforward.router.bias": (moe.experts,),
        "feedforward.router.dropped": (1,),
        "feedforward.experts.up": (moe.experts, hidden, dim),
        "feedforward.experts.down": (moe.experts, dim, hidden),
    }
    return shapes | (_feedforward("feedforward.shared", moe.shared * hidden, config) if moe.shared else {})


def _first_shapes(config: ModelConfig) -> Shapes:
    """With the vocabulary's padding; a tied head is the embedding's."""
    rows = config.padded_vocab_size
    tables: Shapes = {"embed.tokens.weight": (rows, config.dim), "embed.positions.weight": (config.context, config.dim)}
    values = range(config.value_embeddings)
    return tables | {f"values.{layer}.table.weight": (rows, config.key_value_dim) for layer in values}


def _last_shapes(config: ModelConfig) -> Shapes:
    head: Shapes = {} if config.tied_head else {"head.weight": (config.padded_vocab_size, config.dim)}
    return _norm("norm", config) | head


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Every parameter of the Decoder, a shared one once, in the order of named_parameters."""
    shapes = _first_shapes(config)
    for layer in range(config.layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block_shapes(config, layer).items()}
    return shapes | _last_shapes(config)
