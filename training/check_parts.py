"""Whether a user's own parts (model.parts) can stand in the place of ours. Imports torch where there are any."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

from models.config import ModelConfig
from models.parts import PARTS, TARGET, WrongPart, built, class_of, part_gives
from parallel.config import ParallelConfig
from training.keys import NULL_WORDS, nearest, show
from training.refusal import Problem

PAGE = "docs/your-own-model.md shows how"
CALLED = {"attention": "config, layer", "feedforward": "config, width"}  # and keywords
FORWARD = {"attention": "x, positions, documents, values", "feedforward": "x"}
TRIED_LENGTH = 8  # tokens


def class_problems(model: ModelConfig) -> Iterator[Problem]:
    """What is wrong with the names of parts, their classes and their keywords."""
    for name, given in model.parts.items():
        key = f"model.parts.{name}"
        if name not in PARTS:
            near = nearest(name, PARTS, most=1)
            instead = f"model.parts.{near[0]}" if near else "one of " + " | ".join(PARTS)
            yield Problem(key, given, f"is no part of a block, which are {' and '.join(PARTS)}", instead)
        elif name == "attention" and model.latent.kv_rank > 0:
            reason = f"has no latent attention, and model.latent.kv_rank={model.latent.kv_rank}"
            yield Problem(key, given, reason, "model.latent.kv_rank=0")
        elif not isinstance(given.get(TARGET), str):
            reason = "names the class of the part"
            yield Problem(f"{key}.{TARGET}", given.get(TARGET), reason, f"++{key}.{TARGET}=<module>.<class>")
        else:
            try:
                kind = class_of(given[TARGET])
            except WrongPart as wrong:
                yield Problem(f"{key}.{TARGET}", given[TARGET], wrong.reason, wrong.instead)
            else:
                yield from _keyword_problems(name, kind, given)


def _keyword_problems(name: str, kind: type, given: dict[str, Any]) -> Iterator[Problem]:
    """Keywords that the class does not take, or needs."""
    key, title = f"model.parts.{name}", kind.__name__
    parameters = list(inspect.signature(kind).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        reason = f"is called as {title}({CALLED[name]}), and takes {inspect.signature(kind)}"
        yield Problem(f"{key}.{TARGET}", given[TARGET], reason, f"def __init__(self, {CALLED[name]})")
        return
    taken = {p.name: p for p in [*plain[2:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]}
    words = [word for word in given if word != TARGET]
    for word in words:
        value = given[word]
        if isinstance(value, str) and value.lower() in NULL_WORDS:
            yield Problem(f"{key}.{word}", value, "is a text, not the absence of a value", f"{key}.{word}=null")
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"{key}.{word}", value, "is not a finite number", f"{key}.{word}=1.0")
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        free = [word for word in taken if word not in words]
        for word in words:
            if word not in taken:
                near = nearest(word, free, most=1)
                takes = f"{title} takes {', '.join(taken) or 'no keyword'}"
                instead = f"{near[0]}: {show(given[word])}" if near else "leave it out"
                yield Problem(f"{key}.{word}", given[word], f"is no keyword of {title}", f"{instead}; {takes}")
    for word, parameter in taken.items():
        if parameter.default is parameter.empty and word not in words:
            yield Problem(f"{key}.{word}", None, f"{title} needs this keyword", f"+{key}.{word}=<a value>")


def built_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """What is wrong with the parts themselves, once every other key is right: they are built on the meta device."""
    for name, given in model.parts.items():
        key, target = f"model.parts.{name}.{TARGET}", given[TARGET]
        layers = [layer for layer in model.all_blocks if name == "attention" or not model.routed(layer)]
        if not layers:
            reason = "no block has a feed-forward layer: all have experts"
            yield Problem(key, target, reason, "model.moe.experts=0, or model.moe.dense_layers=1")
            continue
        for layer in layers:
            where = "" if layer == layers[0] else f"in block {layer} "
            if faults := _faults_of(model, name, layer, parallel):
                yield from (Problem(key, target, where + reason, instead) for reason, instead in faults)
                break


def _faults_of(model: ModelConfig, name: str, layer: int, parallel: ParallelConfig) -> list[tuple[str, str]]:
    """What is wrong with the part of one block, and what to write."""
    try:
        part = built(model, name, layer)
    except Exception as error:  # the user's code
        return [(f"cannot be built: {type(error).__name__}: {error}", PAGE)]
    return [*_faults(name, part, parallel), *_forward_faults(model, name, layer, part)]


def _forward_faults(model: ModelConfig, name: str, layer: int, part: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with what a part is given and gives."""
    signature = f"def forward(self, {FORWARD[name]})"
    try:
        inspect.signature(part.forward).bind(*FORWARD[name].split(", "))
    except TypeError as error:
        yield f"forward is called with {FORWARD[name]}: {error}", signature
        return
    gives, wanted = part_gives(model, name, layer, TRIED_LENGTH), [1, TRIED_LENGTH, model.dim]
    if gives is not None and list(getattr(gives, "shape", ())) != wanted:
        given = list(gives.shape) if hasattr(gives, "shape") else f"a {type(gives).__name__}"
        yield f"forward gives {given} of x {wanted}", f"a tensor of the shape of x; {PAGE}"


def _faults(name: str, part: Any, parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    """What a part lacks, and what to write."""
    from models.attention import AttentionCore
    from models.roles import parameter_roles

    try:
        parameter_roles(part)
    except LookupError as error:
        yield str(error), f"specify(module, weight=Spec(Role.matrix, std)) where it is made; {PAGE}"
    if buffers := [own for own, _ in part.named_buffers()]:
        yield f"has the buffer {', '.join(buffers)}, which gets no values", "a parameter, or what forward makes anew"
    attends = any(isinstance(module, AttentionCore) for module in part.modules())
    if name == "attention" and parallel.cp > 1 and not attends:
        reason = f"has no AttentionCore, through which ranks share a sequence, and parallel.cp={parallel.cp}"
        yield reason, "models.attention.AttentionCore in it, or parallel.cp=1"
    if parallel.tp > 1:
        from parallel.tensor import without_row  # imports DTensor, which takes seconds

        if names := without_row(part):
            reason = f"tensor parallelism has no row for {', '.join(names)}, and parallel.tp={parallel.tp}"
            yield reason, f"parallel.tensor.ROWS[{type(part).__name__}] = {{...}} in its file, or parallel.tp=1; {PAGE}"
