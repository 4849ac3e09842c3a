"""Files are whole or not there, whenever a write fails or ends."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import training.files
from tests.ranks import ROOT
from training.files import append_line, write_bytes, write_json, write_text

SIZE = 1 << 20


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_text(path, "zwölf\r\n")
    assert path.read_bytes() == b"zw\xc3\xb6lf\r\n"
    value = {"rate": 0.1 + 0.2, "none": None, "list": [1, "é"]}
    write_json(path, value)
    assert json.loads(path.read_text()) == value
    assert names(tmp_path) == ["file"]


def test_data_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed from within the same folder, since a rename is one step on one file system only."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(f"fsync {os.fstat(descriptor).st_size} old {path.read_bytes() == b'old'}")

    def watched_replace(source: Path, target: Path) -> None:
        seen.append(f"replace {source.parent == tmp_path} {source.read_bytes() == b'newer'} {target == path}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_bytes(path, b"newer")
    assert seen == ["fsync 5 old True", "replace True True True"]
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_what_is_no_json_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_json(path, [1])
    with pytest.raises(TypeError):
        write_json(path, [object()])
    assert json.loads(path.read_text()) == [1]
    assert names(tmp_path) == ["file"]


def test_a_reader_sees_one_version_whole_also_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"a" * SIZE)
    script = (
        "import sys, itertools; from pathlib import Path; from training.files import write_bytes\n"
        f"for letter in itertools.cycle([b'a', b'b']): write_bytes(Path(sys.argv[1]), letter * {SIZE})"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=ROOT) as writer:
        versions: set[bytes] = set()
        deadline = time.monotonic() + 20
        while len(versions) < 2 and time.monotonic() < deadline:
            versions.add(path.read_bytes())
        for _ in range(30):
            versions.add(path.read_bytes())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    versions.add(path.read_bytes())
    assert versions == {b"a" * SIZE, b"b" * SIZE}


@pytest.mark.parametrize("length", [3, 20_000])
def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """So that no crash comes between a line and its end; also where it is longer than a buffer."""
    written: list[int] = []

    class Watched(io.FileIO):
        def write(self, data: Any) -> int:
            written.append(len(data))
            return super().write(data)

    def watched_open(path: Path, mode: str) -> io.BufferedWriter:
        return io.BufferedWriter(Watched(path, mode.replace("b", "")))

    monkeypatch.setattr(training.files, "open", watched_open, raising=False)
    append_line(tmp_path / "lines", "x" * length)
    assert written == [length + 1]
    assert (tmp_path / "lines").read_bytes() == b"x" * length + b"\n"


def test_lines_are_added(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "first ü")
    append_line(path, "second")
    assert path.read_bytes() == "first ü\nsecond\n".encode()
