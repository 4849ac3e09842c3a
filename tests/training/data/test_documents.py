"""Files to documents: every kind gives the same texts, and what gives none is counted or refused by name."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from training.config import DataConfig, DataKind
from training.data import documents as reading
from training.data.corpus import Source, sources, stdlib_sources
from training.data.documents import Skipped, blocks, documents, field_problems
from training.refusal import Refusal

TEXTS = ["first", "", "\n", "zwei\r\nÄpfel", "a " * 500, "\u4f60\u597d"]


def listed(*files: Path | str) -> list[Source]:
    return sources(DataConfig(kind=DataKind.files, files=[str(file) for file in files]))


def read(*files: Path, field: str = "text") -> list[str]:
    """Texts; what was skipped as !reason."""
    found = [document for block in blocks(listed(*files)) for document in documents(block, field)]
    return [f"!{d.reason}" if isinstance(d, Skipped) else d.decode() for d in found]


def problems(*files: Path | str) -> list[str]:
    with pytest.raises(Refusal) as refusal:
        list(blocks(listed(*files)))
    return [str(problem) for problem in refusal.value.problems]


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def pack(data: bytes, ending: str) -> bytes:
    return gzip.compress(data) if ending == ".gz" else zstandard.compress(data) if ending == ".zst" else data


@pytest.mark.parametrize("block_bytes", [50, 8 << 20])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_every_kind_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, block_bytes: int
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    expected = [text or "!empty" for text in TEXTS]
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": range(6), "text": TEXTS}), table, row_group_size=4)
    assert read(table) == expected
    rows = tmp_path / f"rows.jsonl{ending}"
    rows.write_bytes(pack(lines(*({"n": 1, "text": text} for text in TEXTS)), ending))
    assert read(rows) == expected
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.TXT{ending}").write_bytes(pack(text.encode(), ending))
    texts = listed(tmp_path / f"*.TXT{ending}")
    assert read(*(source.path for source in texts)) == expected
    for each in (listed(table), listed(rows), texts):
        assert sum(b.source_bytes for b in blocks(each)) == pytest.approx(sum(s.size for s in each), abs=1)


def test_a_zst_file_may_have_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"") + zstandard.compress(b"two"))
    assert read(path) == ["one two"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"\xef\xbb\xbfabc")
    rows.write_bytes(b"\xef\xbb\xbf" + lines({"text": "abc"}))
    assert read(text, rows) == ["abc", "abc"]


def test_what_is_no_document_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = [
        b'{"text": "half\n',
        b'["list"]\n',
        b'"text"\n',
        b'{"text": "\xff"}\n',
        b"\n",
        b"  \n",
        b'{"text": "\\ud800"}\n',
    ]
    path.write_bytes(b"".join(bad) + lines({"texts": "x"}, {"text": None}, {"text": 3}, {"text": "\U0001f600"}))
    assert read(path) == [
        "!not a JSON object",
        "!not a JSON object",
        "!not a JSON object",
        "!not UTF-8",
        "!half of a surrogate pair",
        "!without the field",
        "!field is not text",
        "!field is not text",
        "\U0001f600",
    ]
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Äpfel".encode("latin-1"))
    assert read(latin) == ["!not UTF-8"]


def test_another_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"content": "x", "id": "y"}))
    assert read(path, field="content") == ["x"]


def test_files_without_the_field_are_named(tmp_path: Path) -> None:
    rows, table, good = tmp_path / "a.jsonl.gz", tmp_path / "b.parquet", tmp_path / "c.jsonl"
    rows.write_bytes(gzip.compress(lines({"texts": "x", "id": 1})))
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), table)
    good.write_bytes(lines({"text": "x"}))
    found = field_problems(listed(rows, table, good), "text")
    assert [problem.instead for problem in found] == ["data.field=texts", "data.field=content"]
    assert str(rows) in found[0].reason and str(table) in found[1].reason


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_torn_or_foreign_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = pack(lines(*({"text": str(n) * 50} for n in range(2000))), path.suffix)
    for content in (whole[: len(whole) // 2], whole[:-1], b"plain text, not packed"):
        path.write_bytes(content)
        (problem,) = problems(path)
        assert str(path) in problem and "cannot be read" in problem


def test_a_torn_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 999]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems(path)
    assert str(path) in problem


def test_all_that_is_wrong_with_the_files_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.parquet.gz").touch()
    wrong = [tmp_path / "none*.txt", tmp_path / "folder", tmp_path / "*.csv", tmp_path / "a.parquet.gz"]
    found = problems(*wrong)
    for path, problem, said in zip(
        wrong, found, ["no file", "is a folder", "no known kind", "no known kind"], strict=True
    ):
        assert problem.startswith(f"data.files={path}: ") and said in problem
    assert "data.files=[" in problems()[0]


def test_globs_are_sorted_and_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "odd[1].txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert [s.name for s in listed("odd[1].txt", "**/*.txt", "a.txt")] == ["odd[1].txt", "a.txt", "b.txt", "deep/c.txt"]


def test_the_standard_library_without_what_distributions_change(tmp_path: Path) -> None:
    kept = ["ast.py", "json/__init__.py", "json/decoder.py", "pydoc_data/topics.py"]
    left_out = [
        "sitecustomize.py",
        "_sysconfigdata__linux.py",
        "site-packages/json/__init__.py",
        "test/test_ast.py",
        "unittest/test/test_case.py",
        "ctypes/macholib/dyld.py",
        "idlelib/run.py",
        "tkinter/__init__.py",
        "turtle.py",
        "distutils/core.py",
        "json/__pycache__/decoder.py",
        "json/notes.txt",
        "LICENSE.txt",
    ]
    for name in (*left_out, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("topics = {'b': 'the text\\n', 'a': \"it's\"}\n")
    found = stdlib_sources(tmp_path)
    assert [source.name for source in found] == kept
    texts = [d for block in blocks(found) for d in documents(block, "text")]
    assert texts[3:] == [b"it's", b"the text\n"]


def test_a_python_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"data=text data\.files="):
        stdlib_sources(tmp_path)
