"""To and from the Hugging Face format: config.json and state dict, of each family in models/families."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.families.deepseek import DeepseekV3
from models.families.family import Family, wrong_types
from models.families.family import Piece as Piece
from models.families.gemma import Gemma2
from models.families.gpt2 import Gpt2
from models.families.llama import Llama, Mistral
from models.families.mixtral import Mixtral
from models.families.olmo import Olmo2, Olmo3
from models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from models.shapes import is_learned, parameter_shapes

# A model is of the first that can express it.
FAMILIES: tuple[Family, ...] = (
    Gpt2(),
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Olmo2(),
    Olmo3(),
    Gemma2(),
    Mixtral(),
    Qwen3Moe(),
    DeepseekV3(),
)
PADDED = ("embed.tokens.weight", "head.weight")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights that mean what they say


def family_of(config: ModelConfig) -> Family:
    """The first that can express all of the config. Raises ValueError that names the keys in the way of the nearest."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not known before the tokenizer is")
    found = [(family, family.obstacles(config)) for family in FAMILIES]
    nearest, obstacles = min(found, key=lambda one: len(one[1]))
    if obstacles:
        raise ValueError(
            f"no family of transformers can express this model; the nearest, {nearest.model_type}, has no counterpart "
            f"of {', '.join(obstacles)}"
        )
    return nearest


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """config.json, without what acts in training alone. Raises ValueError for a model that no family can express."""
    return family_of(config).config_to(config)


def config_from_huggingface(theirs: Mapping[str, Any]) -> ModelConfig:
    """Raises ValueError for what is not a model as we have it, and for fields that are not known."""
    if not isinstance(theirs, Mapping):
        raise ValueError("config.json is no dictionary")
    families = {family.model_type: family for family in FAMILIES}
    if (kind := str(theirs.get("model_type"))) not in families:
        raise ValueError(f"model_type={kind} is none that Espalier has: {', '.join(families)}")
    try:
        config = families[kind].config_from(theirs)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"config.json has a value of another type than a {kind} has: {error}") from error
    if wrong := wrong_types(config):
        raise ValueError(f"config.json has values of another type than a {kind} has: {', '.join(wrong)}")
    return config


def pieces(config: ModelConfig) -> list[Piece]:
    """Of every parameter, a tied head once. What routers count is not among them where they have none like it."""
    family = family_of(config)
    found = {name: family.piece(config, name) for name in parameter_shapes(config)}
    if lost := [name for name, piece in found.items() if piece is None and is_learned(name)]:
        raise ValueError(f"a {family.model_type} has no counterpart of {', '.join(lost)}")
    return [piece for piece in found.values() if piece is not None]


def state_to_huggingface(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under their names, without the vocabulary's padding. `state`: whole tensors by our names."""
    family, made = family_of(config), pieces(config)
    theirs: dict[str, Tensor] = {}
    left = state.keys() - {piece.ours for piece in made}
    if biases := [name for name in sorted(left) if name.endswith(".router.bias") and state[name].any()]:
        raise ValueError(f"a {family.model_type} chooses experts without a bias, and {', '.join(biases)} is not 0")
    for piece in made:
        value = state[piece.ours]
        parts = piece.split(value[: config.vocab_size] if piece.ours in PADDED else value)
        theirs |= {name: part.contiguous() for name, part in zip(piece.theirs, parts, strict=True)}
    if config.tied_head:
        theirs["lm_head.weight"] = theirs[family.token_table]
    return theirs


def state_from_huggingface(config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under our names, as read_state gives them."""
    return dict(read_state(config, theirs, theirs.__getitem__))


def read_state(
    config: ModelConfig,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    wanted: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """One parameter after the other under our names, the vocabulary padded with zeros, and 0 for what routers count.

    names: of the weights there are; read: one of them; wanted: our names, all where None. Raises ValueError that names
    what is missing, too much or of another size."""
    family, made = family_of(config), pieces(config)
    named = {name if name.startswith((family.prefix, "lm_head.")) else f"{family.prefix}{name}": name for name in names}
    expected = {name for piece in made for name in piece.theirs}
    buffers = {name for name in named if name.endswith(family.buffers)}
    surplus = set(named) - expected - buffers - ({"lm_head.weight"} if config.tied_head else set())
    if expected - set(named) or surplus:
        raise ValueError(
            f"the Hugging Face weights lack {sorted(expected - set(named))} and have {sorted(surplus)} in addition"
        )
    tables = [name for name in (family.token_table, "lm_head.weight") if name in named]
    if config.tied_head and len(tables) == 2 and not torch.equal(*(read(named[name]) for name in tables)):
        raise ValueError(f"lm_head.weight is not {family.token_table}, and tie_word_embeddings says that it is")
    shapes, sizes = parameter_shapes(config), parameter_shapes(replace(config, vocab_multiple=1))
    given = {piece.ours for piece in made}
    for name, shape in shapes.items():
        if name not in given and (wanted is None or name in wanted):
            yield name, torch.zeros(shape)
    for piece in made:
        if wanted is not None and piece.ours not in wanted:
            continue
        parts = [read(named[name]) for name in piece.theirs]
        if others := {str(part.dtype) for part in parts if part.dtype not in DTYPES}:
            raise ValueError(f"{piece.theirs[0]} is {', '.join(others)}: quantized, and Espalier reads what is not")
        if piece.ours in PADDED and parts[0].shape[0] != config.vocab_size:
            raise ValueError(f"{piece.theirs[0]} has {parts[0].shape[0]} rows, and vocab_size is {config.vocab_size}")
        try:
            value = piece.join(parts)
        except RuntimeError as error:
            sizes_told = [f"{of} {list(part.shape)}" for of, part in zip(piece.theirs, parts, strict=True)]
            raise ValueError(f"{', '.join(sizes_told)}: {piece.ours} cannot be made of these: {error}") from error
        if value.shape != sizes[piece.ours]:
            raise ValueError(
                f"{', '.join(piece.theirs)} are {piece.ours} of shape {list(value.shape)}, and the model's is "
                f"{list(sizes[piece.ours])}"
            )
        if piece.ours in PADDED:
            value = F.pad(value, (0, 0, 0, config.padded_vocab_size - value.shape[0]))
        yield piece.ours, value.contiguous()
