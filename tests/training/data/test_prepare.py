"""Text to tokens: nothing lost, nothing on both sides, made once, and never from a broken cache."""

import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config import DataConfig, DataKind, TokenizerConfig, TokenizerKind
from training.data import corpus
from training.data import prepare as preparing
from training.data.encoding import PIECE_BYTES, pieces, split
from training.data.prepare import Prepared, prepare
from training.data.shards import Tokens
from training.refusal import Refusal
from training.tokenizers import Bytes, build

REPOSITORY = Path(__file__).parents[3]
WORDS = ["lattice", "trunk", "fruit", "Wuchs", "\u679d", "grow ", "prune\n", "0.5", "\U0001f333"]


class Counting(Bytes):
    """Counts the texts it encodes."""

    def __init__(self) -> None:
        self.texts = 0

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.texts += len(texts)
        return super().encode_batch(texts)


def texts_of(seed: int, count: int, longest: int = 400) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config_of(folder: Path, *files: Path, **keys: Any) -> DataConfig:
    names = [str(file) for file in files]
    return DataConfig(kind=DataKind.files, files=names, cache=str(folder / "cache"), **keys)


def documents_of(tokens: Tokens) -> list[list[int]]:
    ends = [*tokens.documents.tolist()[1:], len(tokens)]
    return [tokens.read(start, stop).tolist() for start, stop in zip(tokens.documents.tolist(), ends, strict=True)]


def texts_in(tokens: Tokens) -> list[str]:
    """Byte tokens to texts; each must end with the end of text and have none within."""
    documents = documents_of(tokens)
    assert all(document[-1] == 256 and max(document[:-1], default=0) < 256 for document in documents)
    assert tokens.document_bytes.tolist() == [len(document) - 1 for document in documents]
    return [bytes(document[:-1]).decode() for document in documents]


def refused(config: DataConfig) -> list[str]:
    with pytest.raises(Refusal) as refusal:
        prepare(config, Bytes())
    return [str(problem) for problem in refusal.value.problems]


def test_nothing_is_lost_and_nothing_is_on_both_sides(tmp_path: Path) -> None:
    texts = texts_of(1, 300)
    texts += ["", texts[5], texts[5], "\n", "e\u0301" * 30_000]
    prepared = prepare(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts), heldout=0.2), Bytes())
    train = texts_in(prepared.train)
    sides = {text: split(text.encode(), 0.2, tails=False) for text in texts if text}
    assert train == [text for text in texts if text and sides[text][0]]
    held_out = [text for text in texts if text and sides[text][1]]
    assert 35 <= len(held_out) <= 85
    # The pieces are those texts in another order.
    found = texts_in(prepared.heldout)
    assert Counter(found) == Counter(p.decode() for text in held_out for p in pieces(text.encode()))
    assert found != [piece for text in held_out for piece in [text] if text in found]
    assert train.count(texts[5]) in (0, 3)
    manifest = prepared.manifest
    assert manifest["documents"] == {"train": len(train), "heldout": len(held_out)}
    assert manifest["tokens"] == {"train": len(prepared.train), "heldout": len(prepared.heldout)}
    sizes = {"train": train, "heldout": held_out}
    assert manifest["bytes"] == {side: sum(len(text.encode()) for text in part) for side, part in sizes.items()}
    assert manifest["skipped"] == {"empty": 1}
    assert manifest["split"] == "by document"


def test_gpt2_tokens_are_the_documents(tmp_path: Path) -> None:
    tokenizer = build(TokenizerConfig(kind=TokenizerKind.gpt2))
    texts = texts_of(2, 30, 50)
    prepared = prepare(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts), heldout=0.3), tokenizer)
    train = [text for text in texts if split(text.encode(), 0.3, tails=False)[0]]
    assert documents_of(prepared.train) == [[*tokenizer.encode(text), 50256] for text in train]
    assert prepared.train.document_bytes.tolist() == [len(text.encode()) for text in train]
    assert prepared.train.read(0, 1).dtype == np.uint16


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(1, 4000))
@settings(deadline=None)
def test_pieces_are_the_text(text: str, times: int) -> None:
    cut = [piece.decode() for piece in pieces((text * times).encode())]
    assert "".join(cut) == text * times
    sizes = [len(piece.encode()) for piece in cut]
    assert min(sizes) > 0 and max(sizes) <= PIECE_BYTES
    assert max(sizes) - min(sizes) <= 8


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 1, exclude_max=True), st.booleans())
@settings(deadline=None)
def test_a_split_is_the_text(text: str, heldout: float, tails: bool) -> None:
    train, held_out = split(text.encode(), heldout, tails)
    assert train.decode() + held_out.decode() == text
    if not tails:
        assert not (train and held_out)


def test_the_split_holds_out_its_share() -> None:
    held_out = [bool(split(str(n).encode(), 0.1, tails=False)[1]) for n in range(10_000)]
    # Binomial: 1000 with a standard deviation of 30.
    assert 850 < sum(held_out) < 1150
    more = [bool(split(str(n).encode(), 0.2, tails=False)[1]) for n in range(10_000)]
    assert all(with_more for with_less, with_more in zip(held_out, more, strict=True) if with_less)


def test_one_text_is_held_out_at_its_end(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(2000))
    (tmp_path / "a.txt").write_text(text)
    prepared = prepare(config_of(tmp_path, tmp_path / "a.txt", heldout=0.1), Bytes())
    (train,) = texts_in(prepared.train)
    assert text.startswith(train) and train.endswith("\n")
    assert sorted(texts_in(prepared.heldout)) == sorted(p.decode() for p in pieces(text[len(train) :].encode()))
    assert len(train) == pytest.approx(0.9 * len(text), rel=0.01)
    assert prepared.manifest["split"] == "end of each document"


def test_nothing_held_out(tmp_path: Path) -> None:
    texts = texts_of(3, 10)
    prepared = prepare(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts), heldout=0.0), Bytes())
    assert texts_in(prepared.train) == texts
    assert len(prepared.heldout) == 0 and len(prepared.heldout.documents) == 0


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_refused(tmp_path: Path, texts: list[str]) -> None:
    (problem,) = refused(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts)))
    assert "no text" in problem and (f"{len(texts)} empty" if texts else "no documents") in problem


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (problem,) = refused(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", ["a"])))
    assert problem.startswith("data.heldout=0.05") and "data.heldout=0" in problem


@pytest.mark.parametrize("texts", [["", "\n", "a", ""], ["a", "", "b"], ["b", "\n", ""]])
def test_empty_texts_are_skipped(tmp_path: Path, texts: list[str]) -> None:
    prepared = prepare(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts), heldout=0.0), Bytes())
    assert texts_in(prepared.train) == [text for text in texts if text]
    assert prepared.manifest["skipped"] == {"empty": texts.count("")}


def same(one: Prepared, other: Prepared) -> bool:
    return one.manifest["shards"] == other.manifest["shards"] and one.folder.name == other.folder.name


def test_processes_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.data.documents.BLOCK_BYTES", 20_000)
    monkeypatch.setattr(preparing, "BLOCK_BYTES", 20_000)
    rows = write_rows(tmp_path / "a.jsonl", texts_of(4, 100))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(write_rows(tmp_path / "b", texts_of(5, 100)).read_bytes()))
    files = rows, tmp_path / "b.jsonl.gz"
    alone = prepare(config_of(tmp_path / "one", *files), Bytes())
    monkeypatch.setattr(preparing, "PARALLEL_BYTES", 0)
    shown: list[tuple[str, int, int]] = []
    config = config_of(tmp_path / "two", *files, workers=2)
    together = prepare(config, Bytes(), lambda *progress: shown.append(progress))
    assert same(alone, together)
    total = sum(file.stat().st_size for file in files)
    done = [done for what, done, of in shown if what == "tokenizing" and of == total]
    assert done[0] == 0 and done[-1] == total and done == sorted(done) and len(done) > 5


def test_it_is_made_once(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", texts_of(6, 40))
    tokenizer = Counting()
    first = prepare(config_of(tmp_path, rows), tokenizer)
    assert tokenizer.texts >= 40
    done = tokenizer.texts
    moved = rows.rename(tmp_path / "moved.jsonl")
    again = prepare(config_of(tmp_path, moved), tokenizer)
    assert tokenizer.texts == done and same(first, again)
    assert [entry["name"] for entry in again.manifest["sources"]["each"]] == [str(moved)]
    # Other text, another share or field make others; so does another tokenizer.
    names = {first.folder.name}
    names.add(prepare(config_of(tmp_path, moved, heldout=0.1), tokenizer).folder.name)
    names.add(prepare(config_of(tmp_path, moved), build(TokenizerConfig(kind=TokenizerKind.gpt2))).folder.name)
    names.add(prepare(config_of(tmp_path, write_rows(moved, texts_of(7, 40))), tokenizer).folder.name)
    assert len(names) == 4


def test_the_cache_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "elsewhere"))
    config = config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts_of(8, 40)))
    config.cache = None
    assert prepare(config, Bytes()).folder.parent == tmp_path / "elsewhere"


CALL = """
import sys
from training.config import DataConfig, DataKind
from training.data.prepare import prepare
from training.tokenizers import Bytes
class Slow(Bytes):
    def encode_batch(self, texts):
        import time
        print("encoding", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode_batch(texts)
config = DataConfig(kind=DataKind.files, files=[sys.argv[1]], cache=sys.argv[2])
prepared = prepare(config, Slow(), lambda what, done, total: print(what, flush=True))
print(prepared.folder, len(prepared.train))
"""


def call(rows: Path, cache: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CALL, str(rows), str(cache), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def test_many_at_once_work_once(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", texts_of(9, 40))
    callers = [call(rows, tmp_path / "cache", 0.5) for _ in range(3)]
    said = [caller.communicate(timeout=120)[0].splitlines() for caller in callers]
    assert all(caller.returncode == 0 for caller in callers)
    assert len({lines[-1] for lines in said}) == 1
    assert sum("encoding" in lines for lines in said) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_killed_process_leaves_nothing_that_matters(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", texts_of(10, 40))
    killed = call(rows, tmp_path / "cache", 600)
    assert killed.stdout is not None
    assert any(line == "encoding\n" for line in killed.stdout)
    assert list((tmp_path / "cache").glob("*.tmp"))
    killed.kill()
    killed.wait()
    prepared = prepare(config_of(tmp_path, rows), Bytes())
    assert len(prepared.train) > 0
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Nothing is left behind by SIGKILL."""
    code = """
import os, time
from training.data.encoding import Work, encode_all
from training.data.documents import Block
from training.data.corpus import Kind
from training.tokenizers import Bytes
from pathlib import Path
def main():
    blocks = (Block(Kind.text, [b"x"], Path(), 0, 1) for _ in range(20))
    for _, encoded in encode_all(Work(Bytes(), "text", 0.0, False), blocks, 2):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        print(children, flush=True)
        time.sleep(600)
if __name__ == "__main__":
    main()
"""
    (tmp_path / "parent.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    children = [Path("/proc", child) for child in parent.stdout.readline().split()]
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(child) for child in children)


def running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", ["train-00000.tokens", "heldout-00000.tokens", "manifest.json"])
@pytest.mark.parametrize("change", ["remove", "empty", "cut", "flip"])
def test_a_broken_cache_is_refused_by_name(tmp_path: Path, name: str, change: str) -> None:
    config = config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts_of(11, 40)))
    path = prepare(config, Bytes()).folder / name
    whole = path.read_bytes()
    if change == "remove":
        path.unlink()
    else:
        middle = len(whole) // 2
        # The last byte of a shard is of a document's size, the last but one of a manifest closes it.
        flipped = whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]
        path.write_bytes({"empty": b"", "cut": whole[:middle], "flip": flipped}[change])
    (problem,) = refused(config)
    assert str(path) in problem


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    configs = [config_of(tmp_path, write_rows(tmp_path / f"{n}.jsonl", texts_of(n, 40))) for n in (12, 13)]
    one, other = (prepare(config, Bytes()).folder / "train-00000.tokens" for config in configs)
    one.write_bytes(other.read_bytes())
    (problem,) = refused(configs[0])
    assert "manifest.json" in problem and str(one) in problem


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    (problem,) = refused(config_of(tmp_path, write_rows(tmp_path / "a.jsonl", texts_of(14, 40))))
    assert problem.startswith(f"data.cache={tmp_path / 'cache'}")


def test_all_files_without_the_field_are_named(tmp_path: Path) -> None:
    rows = [write_rows(tmp_path / f"{n}.jsonl", ["x"]) for n in range(3)]
    assert len(refused(config_of(tmp_path, *rows, field="txt"))) == 3


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", texts_of(15, 40))

    def grow(what: str, done: int, total: int) -> None:
        if done == 0:
            with open(rows, "a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(Refusal, match="changed while it was read"):
        prepare(config_of(tmp_path, rows), Bytes(), grow)
    assert not list((tmp_path / "cache").glob("files-*[0-9a-f]"))


def test_hashes_of_large_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "REMEMBER_BYTES", 1000)
    hashed: list[str] = []
    sha256 = corpus.sha256

    def count(source: corpus.Source) -> str:
        hashed.append(source.name)
        return sha256(source)

    monkeypatch.setattr(corpus, "sha256", count)
    old, new = (write_rows(tmp_path / f"{name}.jsonl", texts_of(n, 40)) for n, name in enumerate(["old", "new"]))
    os.utime(old, (1, 1))
    first = prepare(config_of(tmp_path, old, new), Bytes())
    assert len(hashed) == 2
    assert same(prepare(config_of(tmp_path, old, new), Bytes()), first)
    # A file changed a moment ago may change again within the same tick of its clock.
    assert hashed[2:] == [str(new)]
    write_rows(old, texts_of(99, 40))
    assert not same(prepare(config_of(tmp_path, old, new), Bytes()), first)


def test_the_standard_library(tmp_path: Path) -> None:
    """Each file is whole on one side, against the files themselves."""
    config = DataConfig(cache=str(tmp_path))
    prepared = prepare(config, Bytes())
    library = Path(sysconfig.get_path("stdlib"))
    names = [entry["name"] for entry in prepared.manifest["sources"]["each"]]
    assert names == sorted(names)
    files = [(library / name).read_bytes().decode() for name in names if name != "pydoc_data/topics.py"]
    train = Counter(texts_in(prepared.train))
    topics = train - Counter(files)
    held_out = "".join(texts_in(prepared.heldout))
    missing = Counter(file for file in files if file) - train
    assert 0.02 < prepared.manifest["bytes"]["heldout"] / sum(prepared.manifest["bytes"].values()) < 0.08
    for text in missing:
        assert all(piece.decode() in held_out for piece in pieces(text.encode()))
    assert sum(missing.values()) + 20 > prepared.manifest["documents"]["heldout"] >= sum(missing.values())
    assert any(topic.startswith('The "assert" statement') for topic in topics)
    assert prepared.manifest["tokens"]["train"] > 5_000_000
    assert prepared.manifest["skipped"].keys() <= {"empty"}


def test_one_process_may_do_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(preparing.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(preparing.fcntl, "flock", unsupported)
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "a.jsonl", texts_of(16, 40))
        assert len(prepare(config_of(Path(folder), rows), Bytes()).train)
