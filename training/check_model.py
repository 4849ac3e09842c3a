"""Whether the sizes and parts of a model go together. No torch here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from models.config import Balance, Latent, ModelConfig, MoE, Parametrization, Position, QKNorm, RotaryScaling
from training.config import Config, OptimizerKind, leaves
from training.keys import show
from training.nearby import alternatives, around, divisors_around, legal_numbers
from training.refusal import Problem
from training.resolve import VOCABULARIES, World


def model_rules(config: Config, world: World) -> Iterator[Problem]:
    for rule in (_sizes, _latent, _multitoken, _parametrization, _experts):
        yield from rule(config, world)


def _sizes(config: Config, world: World) -> Iterator[Problem]:
    model = config.model
    latent = model.latent.kv_rank > 0  # which has rules of its own
    if not latent and model.head_dim is None and legal_numbers(model.dim, model.heads) and model.dim % model.heads != 0:
        reason = f"must divide model.dim={model.dim}"
        dims = alternatives("model.dim", around(model.dim, model.heads))
        yield Problem(
            "model.heads",
            model.heads,
            reason,
            f"{alternatives('model.heads', divisors_around(model.dim, model.heads))}, or {dims}",
        )
    if not latent and legal_numbers(model.heads, model.kv_heads) and model.heads % model.key_value_heads != 0:
        reason = f"must divide model.heads={model.heads}"
        legal = alternatives("model.kv_heads", divisors_around(model.heads, model.key_value_heads))
        yield Problem("model.kv_heads", model.kv_heads, reason, legal)
    if model.window is None and model.window_stages > 1:
        reason = "there is no window to grow, since model.window is null"
        yield Problem("model.window_stages", model.window_stages, reason, "model.window_stages=1, or model.window=256")
    if model.position is Position.rotary and legal_numbers(model.dim, model.heads) and legal_numbers(model.head_size):
        yield from _rotary(model)
    tables = model.value_embeddings
    if not latent and legal_numbers(model.layers, tables) and 2 * tables > model.layers:
        reason = f"each table serves two blocks, and model.layers={model.layers}"
        instead = f"model.value_embeddings={model.layers // 2}, or model.layers={2 * tables}"
        yield Problem("model.value_embeddings", tables, reason, instead)
    length = config.sequence_length
    if length is not None and length > model.context:
        reason = f"is longer than model.context={model.context}, the positions the model has"
        longer = "" if model.init_from is not None else f", or model.context={length}"  # else the shape is given
        yield Problem("sequence_length", length, reason, f"sequence_length={model.context}{longer}")
    needed = VOCABULARIES.get(config.tokenizer.kind)
    if needed is not None and model.vocab_size is not None and model.vocab_size < needed:
        reason = f"the tokenizer {config.tokenizer.kind.name} has {needed} tokens"
        own = f"the tokenizer of {model.init_from}" if model.init_from is not None else "model.vocab_size=null"
        yield Problem("model.vocab_size", model.vocab_size, reason, own)


def _rotary(model: ModelConfig) -> Iterator[Problem]:
    """model.head_size is known."""
    rotary, turned = model.rotary, int(model.head_size * model.rotary.share)
    latent = model.latent.kv_rank > 0  # whose width has a rule of its own
    if not latent and (model.head_size * rotary.share != turned or turned % 2 != 0 or turned == 0):
        reason = (
            f"of a head of {model.head_size} an even number is turned, and that is {model.head_size * rotary.share:g}"
        )
        even = [count / model.head_size for count in range(2, model.head_size + 1, 2)]
        shares = [share for share in even if share * model.head_size % 2 == 0]
        nearest = min(shares, key=lambda share: abs(share - rotary.share), default=None)
        wider = f"model.head_dim={2 * -(-model.head_size // 2)}"
        instead = wider if rotary.share == 1 or nearest is None else f"model.rotary.share={nearest}"
        yield Problem("model.rotary.share", rotary.share, reason, instead)
    if rotary.scaling is RotaryScaling.llama3 and rotary.low_frequency >= rotary.high_frequency:
        reason = f"must be below model.rotary.high_frequency={rotary.high_frequency:g}"
        yield Problem("model.rotary.low_frequency", rotary.low_frequency, reason, "model.rotary.low_frequency=1.0")
    if rotary.scaling is RotaryScaling.yarn and rotary.beta_slow >= rotary.beta_fast:
        reason = f"must be below model.rotary.beta_fast={rotary.beta_fast:g}"
        yield Problem("model.rotary.beta_slow", rotary.beta_slow, reason, "model.rotary.beta_slow=1.0")


def _latent(config: Config, world: World) -> Iterator[Problem]:
    """What latent attention takes the place of, and what it needs."""
    model, latent, default = config.model, config.model.latent, Latent()
    if latent.kv_rank == 0:
        for name, value in leaves(latent).items():
            if value != leaves(default)[name]:
                reason = "there is no latent attention, and model.latent.kv_rank is 0"
                yield Problem(f"model.latent.{name}", value, reason, "model.latent.kv_rank=512, or leave it out")
        return
    if latent.kv_rank < 0:
        return
    if model.position is not Position.rotary:
        reason = "latent attention (model.latent.kv_rank) has rotary positions"
        yield Problem("model.position", model.position.name, reason, "model.position=rotary")
    if latent.rope_dim >= 1 and latent.rope_dim % 2 != 0:
        reason = "its numbers are turned in pairs"
        legal = alternatives("model.latent.rope_dim", around(latent.rope_dim, 2))
        yield Problem("model.latent.rope_dim", latent.rope_dim, reason, legal)
    if model.rotary.share != 1:
        reason = "latent attention turns all of model.latent.rope_dim"
        yield Problem("model.rotary.share", model.rotary.share, reason, "model.rotary.share=1.0")
    if legal_numbers(latent.nope_dim, latent.rope_dim, latent.value_dim) and latent.value_dim > model.head_size:
        reason = f"a head's values are at most as wide as its keys, nope_dim + rope_dim = {model.head_size}"
        yield Problem("model.latent.value_dim", latent.value_dim, reason, f"model.latent.value_dim={model.head_size}")
    others: dict[str, tuple[Any, Any, str]] = {
        "model.kv_heads": (model.kv_heads, (None, model.heads), "each head has keys of its own"),
        "model.head_dim": (model.head_dim, (None,), "widths of heads are those of model.latent"),
        "model.qk_norm": (model.qk_norm, (QKNorm.none,), "what queries and keys come from is normalized"),
        "model.value_embeddings": (model.value_embeddings, (0,), "values come from the narrow vectors alone"),
    }
    for name, (value, legal_values, reason) in others.items():
        if value not in legal_values:
            yield Problem(name, value, f"with latent attention {reason}", f"{name}={show(legal_values[0])}")


def _multitoken(config: Config, world: World) -> Iterator[Problem]:
    """What the prediction of further tokens needs."""
    model, default = config.model, ModelConfig()
    if model.mtp == 0 and model.mtp_weight != default.mtp_weight:
        reason = "is the weight of further tokens, and model.mtp is 0"
        yield Problem("model.mtp_weight", model.mtp_weight, reason, "model.mtp=1, or leave it out")
    if model.mtp < 1:
        return
    if model.mtp_weight == 0:
        instead = f"model.mtp_weight={default.mtp_weight}, or model.mtp=0"
        yield Problem("model.mtp_weight", 0.0, "leaves what model.mtp predicts without effect", instead)
    if model.position is Position.learned and model.latent.kv_rank == 0:  # else told by another rule
        reason = "a token further on has no position of its own in model.mtp, which needs positions in attention"
        yield Problem("model.position", "learned", reason, "model.position=rotary, or model.mtp=0")
    for name in ("x0", "skips"):
        if getattr(model, name):
            reason = f"what comes after the layers has none, and model.mtp is {model.mtp}"
            yield Problem(f"model.{name}", True, reason, f"model.{name}=false, or model.mtp=0")


def _parametrization(config: Config, world: World) -> Iterator[Problem]:
    model = config.model
    if model.parametrization is Parametrization.standard:
        for name, value in (("mup_base_dim", model.mup_base_dim), ("mup_base_head_dim", model.mup_base_head_dim)):
            if value is not None:
                reason = "is a key of mup, and model.parametrization is standard"
                yield Problem(f"model.{name}", value, reason, f"model.{name}=null")
        return
    if model.mup_base_dim is None and legal_numbers(model.dim):
        reason = "is the width of the model whose learning rate and init_std these are"
        yield Problem("model.mup_base_dim", None, reason, f"model.mup_base_dim={model.dim}")
    standard = "model.parametrization=standard model.mup_base_dim=null"
    if model.latent.kv_rank > 0:
        reason = "says how heads and their width scale, and model.latent.kv_rank has widths of its own"
        yield Problem("model.parametrization", "mup", reason, standard)
    elif config.optimizer.kind is not OptimizerKind.adamw and not config.eval_only:
        reason = f"scales learning rates as Adam needs it, and optimizer.kind is {config.optimizer.kind.name}"
        yield Problem("model.parametrization", "mup", reason, f"optimizer=adamw, or {standard}")


def _experts(config: Config, world: World) -> Iterator[Problem]:
    model, moe, default = config.model, config.model.moe, MoE()
    if moe.experts == 0:
        with_them = replace(config, model=replace(model, moe=replace(moe, experts=8)))
        legal = not list(_experts(with_them, world))
        for name, value in leaves(moe).items():
            if value != leaves(default)[name]:
                instead = "model.moe.experts=8, or leave it out" if legal else "leave it out"
                yield Problem(f"model.moe.{name}", value, "the model has no experts", instead)
        return
    if moe.experts < 0:
        return
    if moe.experts == 1:
        yield Problem(
            "model.moe.experts", 1, "leaves a router nothing to choose", f"model.moe.experts={max(2, moe.top_k)}, or 0"
        )
    elif moe.top_k > moe.experts:
        reason = f"a token goes to different experts, and model.moe.experts={moe.experts}"
        instead = f"model.moe.top_k={min(default.top_k, moe.experts)}, or model.moe.experts={moe.top_k}"
        yield Problem("model.moe.top_k", moe.top_k, reason, instead)
    if moe.experts > 1:
        yield from _groups(moe)
    if moe.top_k == 1 and moe.normalize:
        reason = "a single weight divided by itself is 1, and the router learns nothing"
        yield Problem("model.moe.normalize", True, reason, "model.moe.normalize=false, or model.moe.top_k=2")
    if legal_numbers(model.layers) and moe.dense_layers >= model.layers:
        reason = f"leaves none of model.layers={model.layers} with experts"
        none = f"model.moe.experts=0 model.moe.dense_layers={default.dense_layers}"
        instead = f"model.moe.dense_layers={model.layers - 1}, or {none}"
        yield Problem("model.moe.dense_layers", moe.dense_layers, reason, instead)
    if moe.balance is Balance.none and moe.balance_weight not in (0, default.balance_weight):
        reason = "is the weight of an auxiliary loss, and model.moe.balance is none"
        yield Problem(
            "model.moe.balance_weight", moe.balance_weight, reason, "model.moe.balance=sequence, or leave it out"
        )
    if moe.balance is not Balance.none and moe.balance_weight == 0:
        reason = f"is the weight of model.moe.balance={moe.balance.name}, which then does nothing"
        instead = f"model.moe.balance_weight={default.balance_weight}, or model.moe.balance=none"
        yield Problem("model.moe.balance_weight", 0.0, reason, instead)


def _groups(moe: MoE) -> Iterator[Problem]:
    """Whether groups are equal, have the two experts they are known by, and leave enough to choose from."""
    groups, top, each = moe.groups, moe.top_groups, moe.experts // max(moe.groups, 1)
    if not legal_numbers(groups, top):
        return
    if groups > 1 and (moe.experts % groups != 0 or each < 2):
        reason = f"cuts model.moe.experts={moe.experts} into groups that are not equal, or have less than 2"
        legal = max(n for n in range(1, min(groups, moe.experts // 2) + 1) if moe.experts % n == 0)
        enough = min(max(top, -(-moe.top_k * legal // moe.experts)), legal)
        instead = f"model.moe.groups={legal}" + (f" model.moe.top_groups={enough}" if enough != top else "")
        yield Problem("model.moe.groups", groups, reason, instead)
    elif top > groups:
        reason = f"a token's experts are in different groups, and model.moe.groups={groups}"
        yield Problem("model.moe.top_groups", top, reason, f"model.moe.top_groups={groups}")
    elif top * each < moe.top_k <= moe.experts:
        reason = f"leaves {top * each} experts to choose model.moe.top_k={moe.top_k} from"
        yield Problem("model.moe.top_groups", top, reason, f"model.moe.top_groups={-(-moe.top_k // each)}")
