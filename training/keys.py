"""Every key of the config, what a value for it must look like, and the nearest key to a wrong one. No torch here."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from models.schema import Changes
from training.config import Config
from training.refusal import Problem

NULL_WORDS = {"none", "null", "nil"}
TRUE_WORDS, FALSE_WORDS = {"true", "yes", "on", "y", "1"}, {"false", "no", "off", "n", "0"}
# Of keys that are null by default, what is given as an example where that of the type would make no sense.
EXAMPLES = {"model.moe.capacity_factor": "1.25", "model.logit_softcap": "30.0", "model.attention_softcap": "50.0"}
NEAR = 0.6  # similarity below which a key is no suggestion


@dataclass(frozen=True)
class Key:
    """One leaf of the config. `kind` is its annotation, such as `int | None`."""

    name: str
    kind: Any
    default: Any
    doc: str
    changes: Changes

    @property
    def optional(self) -> bool:
        return NoneType in get_args(self.kind)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types a value can have, null left out."""
        return tuple(k for k in get_args(self.kind) if k is not NoneType) if is_union(self.kind) else (self.kind,)

    def legal(self) -> str:
        """What may be written, in words."""
        words = [_in_words(kind) for kind in self.kinds] + (["null"] if self.optional else [])
        return " or ".join(words)

    def example(self) -> str:
        """A legal value, as it is typed."""
        if self.default is not None:
            return show(self.default)
        return EXAMPLES.get(self.name) or {int: "100", float: "0.1"}.get(self.kinds[0], "null")

    @property
    def is_open(self) -> bool:
        """Whether it is a dictionary, in which + makes new keys."""
        return get_origin(self.kind) is dict

    def is_choice(self) -> bool:
        return any(isinstance(kind, type) and issubclass(kind, Enum) for kind in self.kinds)


class Mismatch(ValueError):
    """A value that a key cannot have; `instead` is the value to write, as typed."""

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.reason, self.instead = reason, instead


def is_union(kind: Any) -> bool:
    return get_origin(kind) is UnionType


def _in_words(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(kind.__members__)
    if get_origin(kind) is dict:
        return "a dictionary of dictionaries"
    names = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}
    return names.get(kind, "a list such as [a,b]")


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def keys() -> dict[str, Key]:
    """All leaves of the config by dotted name, in the order of the schema."""
    return {key.name: key for key in _keys_of(Config, "")}


def _keys_of(schema: type, prefix: str) -> Iterable[Key]:
    for field in fields(schema):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from _keys_of(field.type, f"{prefix}{field.name}.")
        else:
            yield Key(
                prefix + field.name, field.type, default_of(field), field.metadata["doc"], field.metadata["changes"]
            )


def open_key(name: str) -> Key | None:
    """The open dictionary in which a dotted name lies, or which it is."""
    return next((key for key in keys().values() if key.is_open and f"{name}.".startswith(f"{key.name}.")), None)


@cache
def sections() -> dict[str, type]:
    """The groups of the config and their schemas."""
    return {f.name: f.type for f in fields(Config) if isinstance(f.type, type) and is_dataclass(f.type)}


def show(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(show(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{show(v)}' for name, v in value.items())}}}"
    return str(value)


def quoted(text: str) -> str:
    """A text as Hydra reads it back, whatever is in it."""
    escaped = text.replace("'", r"\'").replace("${", r"\${")
    return f"'{escaped}'"


def convert(key: Key, value: Any, typed: str | None = None) -> Any:
    """The value as the schema's type. Stricter than Hydra, which takes 1.5 for a whole number and 'None' for text.
    `typed` is the value as it was written. Raises Mismatch."""
    if value is None:
        if key.optional:
            return None
        raise Mismatch(f"null is not a value of this key; it takes {key.legal()}", key.example())
    if _is_null_word(key, value):
        reason = f"'{value}' is a text here, not the absence of a value; this key takes {key.legal()}"
        raise Mismatch(reason, "null" if key.optional else _nearest_member(key, value) or key.example())
    typed = show(value) if typed is None else typed
    for kind in key.kinds:
        converted = _as(kind, value)
        if kind is str and not isinstance(value, str) and converted != typed:
            break  # a name such as 2026_11 or 1e3, which would become another text
        if converted is not None:
            return converted
    if isinstance(value, float) and not math.isfinite(value):
        raise Mismatch(f"is not a finite number; this key takes {key.legal()}", key.example())
    raise Mismatch(f"this key takes {key.legal()}", _repaired(key, value, typed))


def mismatch(key: Key, shown: str, error: Mismatch) -> Problem:
    """The problem of a value that its key cannot have."""
    doc = "" if key.is_choice() else f" ({key.doc})"  # a choice's document only says the choices again
    return Problem(key.name, shown, error.reason + doc, f"{key.name}={error.instead}")


def _as(kind: Any, value: Any) -> Any:
    """The value as one type, or None where it is not of that type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is int:
        return int(value) if number and math.isfinite(value) and value == int(value) else None
    if kind is float:
        return float(value) if number and math.isfinite(value) else None
    if kind is str:
        return str(value) if isinstance(value, str) or (number and isinstance(value, int)) else None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value] if _is_member(kind, value) else None
    if isinstance(value, list) and get_origin(kind) is list:
        items = [_as(get_args(kind)[0], item) for item in value]
        return None if None in items else items
    if isinstance(value, dict) and get_origin(kind) is dict:
        return value if all(isinstance(name, str) and isinstance(of, dict) for name, of in value.items()) else None
    return None


def _is_null_word(key: Key, value: Any) -> bool:
    """Whether the value is a text such as 'None', which would count as true, where the key has no use for it."""
    if not isinstance(value, str) or value.lower() not in NULL_WORDS or (key.kinds == (str,) and not key.optional):
        return False
    return not any(_is_member(kind, value) for kind in key.kinds)


def _is_member(kind: Any, value: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__


def _nearest_member(key: Key, value: str) -> str | None:
    members = [
        name for kind in key.kinds if isinstance(kind, type) and issubclass(kind, Enum) for name in kind.__members__
    ]
    near = nearest(value.lower(), members)
    return near[0] if near else None


def _repaired(key: Key, value: Any, typed: str) -> str:
    """The likeliest legal value for one that is not, as typed; else an example."""
    text = str(value).strip().lower()
    if bool in key.kinds and text in TRUE_WORDS | FALSE_WORDS:
        return "true" if text in TRUE_WORDS else "false"
    if isinstance(value, str) and {int, float} & set(key.kinds):
        number = _number(text)
        if number is not None:
            return show(int(number)) if int in key.kinds else show(number)
    if isinstance(value, float) and int in key.kinds and math.isfinite(value):
        return f"{math.floor(value)} or {key.name}={math.ceil(value)}"
    if isinstance(value, str) and get_origin(key.kind) is list:
        return f"[{typed}]"
    if str in key.kinds and not isinstance(value, list | dict):
        return f"'\"{typed}\"'"
    return _nearest_member(key, text) or key.example()


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def nearest(word: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names most like a word, best first: by the whole name, or mostly by its last part (lr -> optimizer.lr). One
    that differs only in capitals alone."""
    names = list(names)
    if word.lower() in names:
        return [word.lower()]
    last = word.rpartition(".")[2]
    whole, part = SequenceMatcher(b=word), SequenceMatcher(b=last)  # they prepare b once for all names
    scored = []
    for name in names:
        tail = name.rpartition(".")[2]
        whole.set_seq1(name)
        part.set_seq1(tail)
        alike = part.ratio()
        if min(len(last), len(tail)) >= 3 and (last in tail or tail in last):
            alike = max(alike, 0.8)
        scored.append((max(whole.ratio(), 0.75 * alike + 0.25 * whole.ratio()), name))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return [name for likeness, name in scored if likeness >= max(NEAR, 0.95 * scored[0][0])][:most]


def unknown(name: str, typed: str, more: Iterable[str] = (), prefix: str = "") -> Problem:
    """The problem of a key that does not exist, with the keys and groups most like it.

    `typed`: its value as written; `more`: names beside those of the schema; `prefix`: a + or ~ before the key."""
    groups = () if "." in name else (*sections(), *more)  # what they take is a preset's name
    for opened in (key.name for key in keys().values() if key.is_open):
        parts = name.split(".")
        own = parts[opened.count(".") + 1 :]
        if own and nearest(".".join(parts[: -len(own)]), keys(), most=1) == [opened]:
            return Problem(prefix + name, typed, "there is no such key", f"{prefix}{opened}.{'.'.join(own)}={typed}")
    near = nearest(name, {*keys(), *groups})
    everywhere = "a key of docs/configuration.md; `python train.py --cfg job` lists them with their values"
    instead = " or ".join(f"{other}={typed}" for other in near) or everywhere
    return Problem(prefix + name, typed, "there is no such key", instead)
