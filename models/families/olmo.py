"""OLMo 2 (OLMo et al. 2024) and OLMo 3 (2025)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import ModelConfig, NormPlace, QKNorm, RotaryScaling
from models.families.family import Fields
from models.families.llama import PROJECTIONS, Plain
from models.families.qwen import QK_NORMS
from models.families.rope import Rope, keys_of, merged, rope_to, scaling_to, taken
from models.families.windows import FULL, SLIDING, layer_types, windows_of

AFTER = {
    "attention_post_norm": "post_attention_layernorm",
    "feedforward_post_norm": "post_feedforward_layernorm",
}


class Olmo2(Plain):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**Plain.fixed, "norm_place": NormPlace.after, "qk_norm": QKNorm.all}
    meant: ClassVar[Mapping[str, Any]] = {**Plain.meant, "attention_bias": False}
    names: ClassVar[Mapping[str, str]] = {**PROJECTIONS, **QK_NORMS, **AFTER}


class Olmo3(Olmo2):
    """Rotary positions are scaled in blocks with a window, in those without, or in all. Only `rope_parameters` says so;
    the older form is written beside it where it means the same."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    theta = 500_000.0

    def write(self, config: ModelConfig) -> dict[str, Any]:
        types = layer_types(config)
        plain: Rope = {"rope_theta": config.rotary.theta, "rope_type": "default"}
        scaled = plain | (scaling_to(config) or {})
        everywhere = config.rotary.windows and config.rotary.scaling is not RotaryScaling.none and SLIDING in types
        found = super().write(config) | {
            # transformers wants a window where no block uses it.
            "sliding_window": config.window or config.context,
            "layer_types": types,
            "rope_parameters": {SLIDING: scaled if everywhere else plain, FULL: scaled},
        }
        return {field: value for field, value in found.items() if not (everywhere and field in rope_to(config))}

    def read(self, theirs: Fields) -> dict[str, Any]:
        types, window = theirs.pop("layer_types", None), theirs.pop("sliding_window", 4096)
        if types is None:
            types = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(theirs["num_hidden_layers"])]
        older, newer = taken(theirs)
        plain = {field: value for field, value in older.items() if field == "rope_theta"}
        full = keys_of(merged(older, newer.pop(FULL, {})), self.theta)
        sliding = keys_of(merged(plain, newer.pop(SLIDING, {})), self.theta)
        if newer:
            raise ValueError(f"rope_parameters of an olmo3 are by kind of block, and these are not: {', '.join(newer)}")
        unscaled = {"rotary.theta": full["rotary.theta"]}
        if SLIDING in types and sliding not in (full, unscaled):
            raise ValueError("rope_parameters of blocks with and without a window differ by more than a scaling")
        windows = {"rotary.windows": sliding == full}
        return super().read(theirs) | full | windows | windows_of(types, window)
