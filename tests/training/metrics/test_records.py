import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from training.metrics.records import read, to_line

values = st.one_of(
    st.none(), st.integers(), st.floats(), st.text().filter(lambda text: text not in ("nan", "inf", "-inf"))
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), values), st.integers(1, 2**62))
def test_a_line_is_strict_json_and_keeps_every_digit(tmp_path_factory: Any, others: dict[str, Any], step: int) -> None:
    record = others | {"step": step}
    line = to_line(record)
    assert "\n" not in line

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(line, parse_constant=refuse)
    path = tmp_path_factory.getbasetemp() / "line.jsonl"
    path.write_text(line + "\n")
    (back,) = read(path)
    assert repr(back) == repr(record)  # repr: NaN is not equal to itself


def test_non_finite_numbers_are_strings(tmp_path: Path) -> None:
    assert json.loads(to_line({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})) == {
        "step": 1,
        "a": "nan",
        "b": "inf",
        "c": "-inf",
    }


def test_torn_lines_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n\0\0\0\0\n[3]\n{"loss": 1}\n\xff\n{"step": 4}\n{"st')
    assert [record["step"] for record in read(path)] == [1, 4]
    assert read(tmp_path / "none.jsonl") == []
