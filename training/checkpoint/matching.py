"""Whether a checkpoint fits a state: told by name, all of it at once, before a tensor is read."""

from dataclasses import dataclass

import torch

from training.checkpoint.folders import MANIFEST
from training.checkpoint.remote import Folder
from training.checkpoint.tensors import State, Stored
from training.refusal import Problem


@dataclass(frozen=True)
class Mismatch:
    """Names where a checkpoint and a state differ; shapes and dtypes with both values."""

    missing: list[str]
    unexpected: list[str]
    shapes: list[str]
    dtypes: list[str]


def mismatch(state: State, stored: dict[str, Stored]) -> Mismatch:
    """Compares one rank's state with the whole checkpoint.

    Only the parts that the state has are looked at: for a state of model.* alone, optimizer.* is not unexpected.
    A dtype may become wider (float32 read into float64), not narrower.
    """
    parts = {_part(name) for name in state}
    both = [name for name in state if name in stored]
    return Mismatch(
        missing=[name for name in state if name not in stored],
        unexpected=[name for name in stored if _part(name) in parts and name not in state],
        shapes=[
            f"{name} is {list(stored[name].shape)} in the checkpoint and {list(state[name].shape)} here"
            for name in both
            if stored[name].shape != tuple(state[name].shape)
        ],
        dtypes=[
            f"{name} is {stored[name].dtype} in the checkpoint and {state[name].dtype} here"
            for name in both
            if torch.promote_types(stored[name].dtype, state[name].dtype) != state[name].dtype
        ],
    )


def _part(name: str) -> str:
    return name.split(".")[0]


def over_ranks(found: list[Mismatch]) -> Mismatch:
    """What holds for the run. Unexpected is what no rank has a place for: a pipeline stage holds only its own names."""
    return Mismatch(
        missing=_union([one.missing for one in found]),
        unexpected=sorted(set.intersection(*(set(one.unexpected) for one in found))),
        shapes=_union([one.shapes for one in found]),
        dtypes=_union([one.dtypes for one in found]),
    )


def _union(lists: list[list[str]]) -> list[str]:
    return sorted({entry for entries in lists for entry in entries})


def name_problems(folder: Folder, found: Mismatch) -> list[Problem]:
    instead = f"the model and optimizer it was saved with: info.config in its {MANIFEST}"
    problems = []
    if found.missing:
        problems.append(Problem("checkpoint.load", folder, f"the checkpoint lacks {', '.join(found.missing)}", instead))
    if found.unexpected:
        reason = f"the checkpoint has {', '.join(found.unexpected)}, for which this run has no place"
        problems.append(Problem("checkpoint.load", folder, reason, instead))
    return problems


def value_problems(folder: Folder, found: Mismatch) -> list[Problem]:
    problems = []
    if found.shapes:
        instead = f"the model keys of {folder / MANIFEST} (info.config)"
        problems.append(
            Problem("model", "(as given)", f"other shapes than in {folder}: {'; '.join(found.shapes)}", instead)
        )
    if found.dtypes:
        reason = f"values of {folder} would be rounded: {'; '.join(found.dtypes)}"
        problems.append(Problem("precision", "(as given)", reason, "the precision it was saved with, or a wider one"))
    return problems
