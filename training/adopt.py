"""What a run takes over from a checkpoint that another run saved. No torch here."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.checkpoint.folders import Saved
from training.config import Config, leaves
from training.keys import Mismatch, convert, keys, show
from training.reading import first_line, resolved
from training.refusal import Problem
from training.resolve import resolve_model
from training.unresolved import in_words, is_same, saved_values, to_write

SCORED_WITH = (
    "model.",
    "tokenizer.",
    "data.kind",
    "data.files",
    "data.field",
    "data.heldout",
    "data.mask_documents",
    "sequence_length",
    "evals.tasks",
    "evals.heldout_tokens",
    "evals.continuation_items",
    "seed",
    "precision.",
)
# do not change what the weights are
NOT_COMPARED = (
    "model.attention",
    "model.init_from",
    "model.tokenizer",
    "model.dropout",
    "model.init_std",
    "model.moe.balance",
    "model.moe.balance_weight",
    "model.moe.bias_rate",
    "model.moe.z_loss",
    "model.moe.capacity_factor",
    "model.moe.forced_balance",
)


def adopt(config: Config, saved: Saved, given: frozenset[str]) -> list[Problem]:
    """For eval_only: sets what the scores depend on to what the checkpoint was trained with, except keys given on the
    command line, and resolves the rest. A run without evaluations says nothing of them. Values that came from the
    environment are taken from this one: a problem where it has none, or another."""
    theirs, known = saved.info["config"], saved.info.get("from_environment", {})
    unscored = not theirs["evals.tasks"]
    adopted = [
        key
        for key in theirs
        if key.startswith(SCORED_WITH) and not (unscored and key.startswith("evals.")) and not is_given(key, given)
    ]
    problems = []
    for key in adopted:
        try:
            set_key(config, key, from_environment(theirs, key) if key in known else theirs[key])
        except (OmegaConfBaseException, Mismatch) as error:
            reason = f"{saved.folder} was trained with a value of the environment: {first_line(error)}"
            problems.append(Problem(key, show(theirs[key]), reason, f"that variable, or {to_write(key, theirs[key])}"))
    if problems:
        return problems
    resolve_model(config)
    now = leaves(config)
    return [
        different(key, now[key], saved, theirs[key])
        for key in adopted
        if key in known and not is_same(now[key], known[key])
    ]


def is_given(key: str, given: frozenset[str]) -> bool:
    """By itself or with its group; but no preset of data says whether documents are kept apart."""
    return key in given or (key != "data.mask_documents" and key.partition(".")[0] in given)


def from_environment(texts: dict[str, Any], key: str) -> Any:
    """A leaf of a saved config, with its interpolations resolved here. Raises OmegaConfBaseException or Mismatch."""
    tree = OmegaConf.create({})
    for name, text in texts.items():
        OmegaConf.update(tree, name, text)
    section, _, _ = key.rpartition(".")
    value = convert(keys()[key], resolved(keys()[key], tree[section] if section else tree))
    return value.name if isinstance(value, Enum) else value


def different(key: str, now: Any, saved: Saved, was: Any) -> Problem:
    """The problem of a key that has another value than the checkpoint was trained with."""
    return Problem(key, show(now), f"{saved.folder} was trained with {in_words(was)}", to_write(key, was))


def set_key(config: Config, key: str, value: Any) -> None:
    """Sets a leaf by its dotted name; enums from their names. A key that no longer exists is left out."""
    *sections, last = key.split(".")
    owner: Any = config
    for section in sections:
        owner = getattr(owner, section, None)
    if owner is None or not is_dataclass(owner) or last not in {field.name for field in fields(owner)}:
        return
    kind = type(getattr(owner, last))
    setattr(owner, last, kind[value] if issubclass(kind, Enum) else value)


def load_problems(config: Config, saved: Saved) -> list[Problem]:
    """Why the weights of checkpoint.load are not for this model, from the configs alone."""
    now = leaves(config)
    theirs = saved_values(saved.info, config)
    found = [key for key in now if key.startswith("model.") and key not in NOT_COMPARED]
    if now["model.vocab_size"] is None:  # known with the tokenizer
        found.remove("model.vocab_size")
    problems = [
        different(key, now[key], saved, theirs[key]) for key in found if key in theirs and theirs[key] != now[key]
    ]
    if any(theirs.get(key) != now[key] for key in ("tokenizer.kind", "tokenizer.name")):
        was = theirs.get("tokenizer.kind")
        reason = f"{saved.folder} was trained with {in_words(was)}"
        problems.append(Problem("tokenizer.kind", now["tokenizer.kind"], reason, to_write("tokenizer", was)))
    return problems
