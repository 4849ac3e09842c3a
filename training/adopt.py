"""What a run takes over from a checkpoint that another run saved. No torch here."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from training.checkpoint.folders import Saved
from training.config import Config, leaves
from training.refusal import Problem

SCORED_WITH = (
    "model.",
    "tokenizer.",
    "data.kind",
    "data.files",
    "data.field",
    "data.heldout",
    "sequence_length",
    "evals.tasks",
    "evals.heldout_tokens",
    "evals.continuation_items",
    "seed",
    "precision.",
)
# do not change what the weights are
NOT_COMPARED = ("model.attention", "model.tokenizer", "model.dropout", "model.init_std")


def adopt(config: Config, saved: Saved, given: frozenset[str]) -> None:
    """For eval_only: sets what the scores depend on to what the checkpoint was trained with, except keys given on the
    command line. A run without evaluations says nothing of them."""
    theirs = saved.info["config"]
    unscored = not theirs["evals.tasks"]
    for key, value in theirs.items():
        if unscored and key.startswith("evals."):
            continue
        if key.startswith(SCORED_WITH) and not {key, key.partition(".")[0]} & given:
            set_key(config, key, value)


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
    theirs = saved.info["config"]
    found = [key for key in now if key.startswith("model.") and key not in NOT_COMPARED]
    problems = [
        Problem(key, now[key], f"{saved.folder} was trained with {theirs[key]}", f"{key}={theirs[key]}")
        for key in found
        if key in theirs and theirs[key] != now[key]
    ]
    if theirs.get("tokenizer.kind") != now["tokenizer.kind"] or theirs.get("tokenizer.name") != now["tokenizer.name"]:
        was = theirs.get("tokenizer.kind")
        problems.append(
            Problem(
                "tokenizer.kind", now["tokenizer.kind"], f"{saved.folder} was trained with {was}", f"tokenizer={was}"
            )
        )
    return problems
