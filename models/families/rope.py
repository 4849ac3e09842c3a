"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, since transformers 5 both in `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig, RotaryScaling
from models.families.family import SCALINGS, Fields

Rope = dict[str, Any]

# Our keys of a kind of scaling -> their fields.
NAMES = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "magnitude": "attention_factor",
}


def scaling_to(config: ModelConfig) -> Rope | None:
    """`rope_scaling`. What is null with us is theirs to derive, in the same way."""
    rotary = config.rotary
    if rotary.scaling is RotaryScaling.none:
        return None
    found: Rope = {"rope_type": rotary.scaling.name}
    for key in SCALINGS[rotary.scaling]:
        value = getattr(rotary, key)
        if key == "original_context":
            value = value or config.context
        if value is not None:
            found[NAMES[key]] = value
    return found


def rope_to(config: ModelConfig) -> Rope:
    """In the older form, which transformers 5 reads as well."""
    return {"rope_theta": config.rotary.theta, "rope_scaling": scaling_to(config)}


def rope_from(theirs: Fields, theta: float) -> Rope:
    """Keys of ModelConfig, from either form or both. theta: the family's own where none is given."""
    return keys_of(merged(*taken(theirs)), theta)


def taken(theirs: Fields) -> tuple[Rope, Rope]:
    """The older form in the manner of the newer one, and the newer one."""
    older = dict(theirs.pop("rope_scaling", None) or {})
    if (theta := theirs.pop("rope_theta", None)) is not None:
        older["rope_theta"] = theta
    return older, dict(theirs.pop("rope_parameters", None) or {})


def merged(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Rope:
    older, newer = named(older), named(newer)
    for field in older.keys() & newer.keys():
        if older[field] != newer[field]:
            raise ValueError(
                f"config.json has {field}={older[field]} in its older form and {newer[field]} in the newer"
            )
    return older | newer


def named(rope: Mapping[str, Any]) -> Rope:
    """With `rope_type` for what was `type` once."""
    found = {field: value for field, value in rope.items() if value is not None}
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
        found.pop("type", None)
    return found


def keys_of(rope: Rope, theta: float) -> Rope:
    """Of one merged form."""
    left = dict(rope)
    kind = left.pop("rope_type", "default")
    found: Rope = {"rotary.theta": float(left.pop("rope_theta", theta))}
    if left.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"no model here turns a part of each head: partial_rotary_factor={rope['partial_rotary_factor']}"
        )
    if kind != "default":
        if kind not in RotaryScaling.__members__:
            raise ValueError(f"Espalier has no rope_type={kind}")
        if "factor" not in left:
            raise ValueError(f"rope_type={kind} lacks factor")
        found["rotary.scaling"] = RotaryScaling[kind]
        if kind == "yarn":
            left = with_magnitude(left)
        for key in SCALINGS[RotaryScaling[kind]]:
            if NAMES[key] in left:
                value = left.pop(NAMES[key])
                found[f"rotary.{key}"] = value if key == "original_context" else float(value)
    if left:
        raise ValueError(
            "Espalier does not know of rotary positions: " + ", ".join(f"{k}={v}" for k, v in left.items())
        )
    return found


def with_magnitude(yarn: Rope) -> Rope:
    """With attention_factor for mscale and mscale_all_dim, and without truncate=true, which is how it is."""
    left = dict(yarn)
    if left.get("truncate") is True:
        del left["truncate"]
    own, all_dim = left.pop("mscale", 0.0), left.pop("mscale_all_dim", 0.0)
    if own and all_dim:
        of = [0.1 * scale * math.log(left["factor"]) + 1 for scale in (own, all_dim)]
        left.setdefault("attention_factor", of[0] / of[1])
    return left
