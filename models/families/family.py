"""What a family of Hugging Face models is: the fields of its config.json and the names of its weights, beside ours."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, get_args, get_origin

import torch
from torch import Tensor

from models.config import Latent, ModelConfig, MoE, Position, Rotary, RotaryScaling
from models.position import rotary_magnitude
from models.schema import Changes

# Fields of config.json that change no number: of tokens, files, generation, and of losses that are not asked for.
NEUTRAL = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "name_or_path", "_name_or_path"),
    *("_commit_hash", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
    *("use_cache", "cache_implementation", "return_dict", "task_specific_params", "pretraining_tp"),
    *("attn_implementation", "_attn_implementation", "_experts_implementation", "router_aux_loss_coef"),
}
# Keys that act in training alone, which config.json is not about.
TRAINING = frozenset(
    {"dropout", "z_loss", "window_stages", "tokenizer", "init_std", "init_residual", "init_embedding_std", "init_from"}
    | {"moe.balance", "moe.balance_weight", "moe.z_loss", "moe.capacity_factor"}
)
# Keys of one kind of scaling.
SCALINGS: dict[RotaryScaling, tuple[str, ...]] = {
    RotaryScaling.none: (),
    RotaryScaling.linear: ("factor",),
    RotaryScaling.llama3: ("factor", "original_context", "low_frequency", "high_frequency"),
    RotaryScaling.yarn: ("factor", "original_context", "beta_fast", "beta_slow", "magnitude"),
}


@dataclass(frozen=True)
class Piece:
    """A parameter of ours and the weights of theirs that it is made of.

    join: theirs to ours, split: ours to theirs, both without the vocabulary's padding."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


class Fields(dict[str, Any]):
    """config.json. What is taken is gone, what is left has not been understood."""

    def take(self, name: str) -> Any:
        if name not in self:
            raise ValueError(f"config.json lacks {name}")
        return self.pop(name)


class Family:
    """One model_type. A subclass adds to config.json in `write` what is not one field for one key, and reads it in
    `read`."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    keys: ClassVar[Mapping[str, str]]  # key of ModelConfig, nested ones with a dot -> their field of the same meaning
    fixed: ClassVar[Mapping[str, Any]]  # keys of ModelConfig that have one value here
    meant: ClassVar[Mapping[str, Any]]  # their fields that have one value in ours
    defaults: ClassVar[Mapping[str, Any]] = {}  # their fields where config.json leaves them out
    neutral: ClassVar[frozenset[str]] = TRAINING | {"fused_qkv"}  # keys that the family need not express
    prefix: ClassVar[str]  # of names, which a file of the model without its head leaves out
    token_table: ClassVar[str]  # which a tied head shares
    buffers: ClassVar[tuple[str, ...]] = ()  # ends of names in older files that are no weights

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {}

    def read(self, theirs: Fields) -> dict[str, Any]:
        """Takes fields, looks at those of `keys`; returns keys of ModelConfig."""
        return {}

    def piece(self, config: ModelConfig, name: str) -> Piece | None:
        """Of a parameter of ours; None where they have none like it."""
        raise NotImplementedError

    def config_to(self, config: ModelConfig) -> dict[str, Any]:
        known = flat(config)
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return names | {field: known[key] for key, field in self.keys.items()} | dict(self.meant) | self.write(config)

    def config_from(self, theirs: Mapping[str, Any]) -> ModelConfig:
        left = Fields({**self.defaults, **theirs})
        wrong = {field: left.pop(field, value) for field, value in self.meant.items()}
        differing = [f"{field}={value}" for field, value in wrong.items() if value not in (None, self.meant[field])]
        if differing:
            raise ValueError(f"not a {self.model_type} as Espalier has it: {', '.join(differing)}")
        found = self.read(left)
        keys = {key: left.take(field) for key, field in self.keys.items()} | dict(self.fixed) | found
        unknown = [f"{field}={value}" for field, value in left.items() if value and field not in NEUTRAL]
        if unknown:
            raise ValueError(
                f"config.json has fields that Espalier does not know for a {self.model_type} and that may change the "
                f"mathematics: {', '.join(unknown)}"
            )
        return unflat(keys)

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Settings that config.json of this family does not bring back."""
        wanted, found = normal(config), normal(self.config_from(self.config_to(config)))
        # What only one of them uses depends on a key that differs; as set by hand it is in the way too.
        written, default = flat(config), flat(ModelConfig())
        lost = {key for key in wanted.keys() - found.keys() if written[key] != default[key]}
        differing = {key for key in wanted.keys() & found.keys() if not alike(wanted[key], found[key])}
        return [
            f"model.{key}={shown(value)}"
            for key, value in wanted.items()
            if key not in self.neutral and key in lost | differing
        ]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The keys that change the mathematics, nested ones with a dot."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= flat(value, f"{prefix}{field.name}.")
        elif field.metadata["changes"] is Changes.math:
            found[prefix + field.name] = value
    return found


def unflat(keys: Mapping[str, Any]) -> ModelConfig:
    def under(part: str) -> dict[str, Any]:
        return {key.removeprefix(f"{part}."): value for key, value in keys.items() if key.startswith(f"{part}.")}

    own = {key: value for key, value in keys.items() if "." not in key}
    rotary, latent, moe = Rotary(**under("rotary")), Latent(**under("latent")), MoE(**under("moe"))
    return ModelConfig(**own, rotary=rotary, latent=latent, moe=moe)


def wrong_types(config: Any, prefix: str = "model.") -> list[str]:
    """Keys whose values are of another type than they are declared with; a whole number may stand for any number."""
    found: list[str] = []
    for field in fields(config):
        value, kind = getattr(config, field.name), field.type
        if is_dataclass(value):
            found += wrong_types(value, f"{prefix}{field.name}.")
        elif get_origin(kind) is not dict:
            legal = get_args(kind) or (kind,)
            legal = (*legal, int) if float in legal else legal
            if not isinstance(value, legal) or (isinstance(value, bool) and bool not in legal):
                found.append(f"{prefix}{field.name}={value!r}")
    return found


def normal(config: ModelConfig) -> dict[str, Any]:
    """The keys that the model uses, with what null stands for."""
    found = flat(config)
    found |= {"kv_heads": config.key_value_heads, "head_dim": config.head_size, "ffn_dim": config.feedforward_dim}
    found["qkv_bias"] = None if config.has_qkv_bias == config.bias else config.has_qkv_bias
    found["attention_scale"] = config.attention_scale or config.head_size**-0.5
    found["embedding_scale"] = config.embedding_scale or 1.0
    windowed = any(config.window_of(layer) is not None for layer in range(config.layers))
    if not windowed:
        found["window"] = None
    if not windowed or config.full_every > config.layers:
        found["full_every"] = 0

    scaling = config.rotary.scaling
    found["rotary.original_context"] = config.rotary.original_context or config.context
    found["rotary.magnitude"] = rotary_magnitude(config)
    kept = {"theta", "share", "scaling", *SCALINGS[scaling]}
    kept |= {"windows"} if windowed and scaling is not RotaryScaling.none else set()
    rotary = {f"rotary.{key}" for key in kept} if config.position is Position.rotary else set()

    found["moe.dim"] = config.expert_dim
    routed = [config.routed(layer) for layer in range(config.layers)]
    if all(routed):
        del found["ffn_dim"]
    return {
        key: value
        for key, value in found.items()
        if (key in rotary or not key.startswith("rotary."))
        and (any(routed) or key == "moe.experts" or not key.startswith("moe."))
    }


def alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def shown(value: Any) -> str:
    """As a command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return getattr(value, "name", None) or f"{value}"


def same(ours: str, theirs: str) -> Piece:
    return Piece(ours, (theirs,), lambda parts: parts[0], lambda value: (value,))


def stacked(ours: str, theirs: Sequence[str]) -> Piece:
    """Experts, which they have one by one."""
    return Piece(ours, tuple(theirs), lambda parts: torch.stack(list(parts)), lambda value: value.unbind())


def grouped(config: ModelConfig, ours: str, theirs: Sequence[str]) -> Piece:
    """Queries, keys and values."""
    return Piece(ours, tuple(theirs), lambda parts: to_groups(config, parts), lambda value: from_groups(config, value))


def to_groups(config: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    """All q, all k, all v -> rows in groups, one a head of keys and values, as models.attention.Attention has them."""
    groups = [part.unflatten(0, (config.key_value_heads, -1)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def from_groups(config: ModelConfig, qkv: Tensor) -> list[Tensor]:
    each = config.heads // config.key_value_heads * config.head_size
    groups = qkv.unflatten(0, (config.key_value_heads, -1))
    return [part.flatten(0, 1) for part in groups.split([each, config.head_size, config.head_size], dim=1)]
