"""How a config key is declared: its default, a line of documentation, and what changing it changes."""

from dataclasses import field
from enum import Enum
from typing import Any


class Changes(Enum):
    """What a key changes. A resume compares the keys that change the mathematics and lets the others differ."""

    math = "math"  # the numbers of the run
    layout = "layout"  # where and how fast they are computed
    io = "io"  # what is read, written and shown


def key(default: Any, doc: str, changes: Changes = Changes.math) -> Any:
    """A dataclass field with its documentation. `default` may be a class, which is then built anew for each config."""
    metadata = {"doc": doc, "changes": changes}
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
