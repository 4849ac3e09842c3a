"""Lines of metrics.jsonl (one a step) and evals.jsonl (one a score)."""

import json
import math
from pathlib import Path
from typing import Any

Record = dict[str, Any]

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_line(record: Record) -> str:
    """JSON without line breaks. Numbers keep every digit; JSON has no NaN or infinity: these are the strings nan, inf,
    -inf."""
    plain = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False)


def from_line(line: bytes) -> Record | None:
    """The record of a line, or None where there is none: a crash can leave a torn line or a block of zeros."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}


def read(path: Path) -> list[Record]:
    """All whole records of a file; none where there is no file."""
    if not path.exists():
        return []
    return [record for line in path.read_bytes().splitlines() if (record := from_line(line)) is not None]
