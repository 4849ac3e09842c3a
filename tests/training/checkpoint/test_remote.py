"""Checkpoints at a URL, on a real S3 server: SeaweedFS, which checks signatures and lists in pages."""

import http.server
import json
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any
from urllib.error import HTTPError

import pytest

from scripts.checkpoints import main
from tests import s3
from tests.ranks import run_ranks
from tests.runs.drive import REFUSED, Runs, hit_in_step
from tests.training.checkpoint.states import assert_holds, cpu_ranks, state
from training.checkpoint import folders, remote
from training.checkpoint.remote import Remote, folder_at, missing_package
from training.checkpoint.retention import Policy
from training.checkpoint.store import Store, find, find_intact
from training.ranks import Ranks
from training.refusal import Refusal

needs_server = pytest.mark.skipif(s3.program() is None, reason="there is no S3 server: uv sync --group store")


def test_what_is_a_url() -> None:
    assert folder_at("outputs/a") == folder_at("file://outputs/a") == Path("outputs/a")
    assert folder_at("s3://bucket/run/") == Remote("s3://bucket/run")
    place = Remote("s3://bucket") / "run" / "step-000001"
    assert (str(place), place.name, place.parent) == (
        "s3://bucket/run/step-000001",
        "step-000001",
        Remote("s3://bucket/run"),
    )
    assert missing_package("outputs/a") == missing_package("file:///a") == missing_package("memory://a") == ""
    assert missing_package("s4://bucket") == "fsspec knows no s4://"


def test_what_may_go_better_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    answers: Iterator[Any] = iter([TimeoutError("slow"), OSError(5, "503"), RuntimeError("odd"), 7])

    def answer(files: Any) -> Any:
        said = next(answers)
        if isinstance(said, Exception):
            raise said
        return said

    assert Remote("memory://a")._try(answer) == 7 and waited == [0.5, 1.0, 2.0]
    answers = iter([PermissionError(13, "Forbidden")])
    with pytest.raises(PermissionError, match="Forbidden: 'memory://a'"):
        Remote("memory://a")._try(answer)
    answers = iter(OSError(5, "503") for _ in range(6))
    with pytest.raises(OSError, match="503: 'memory://a'"):
        Remote("memory://a")._try(answer)
    assert waited == [0.5, 1.0, 2.0, *remote.WAITS]


def test_what_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Remote("memory://late/step-000001")
    file = folders.hash_bytes(b"index")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        (place / ".metadata").write_bytes(b"ind" if len(waited) == 1 else b"index")

    monkeypatch.setattr(folders.time, "sleep", sleep)
    assert folders.complete(place, 1, {}, {".metadata": file}).step == 1
    assert waited == [0.5, 1.0]
    (place / ".metadata").write_bytes(b"ind")
    monkeypatch.setattr(folders.time, "sleep", waited.append)
    with pytest.raises(folders.Broken, match=r"\.metadata has 3 bytes instead of 5"):
        folders.complete(place, 1, {}, {".metadata": file})


# ---- the server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Server]:
    with s3.serve(tmp_path_factory.mktemp("s3")) as server:
        run_ranks(1, make_bucket, server.environment)
        yield server


@pytest.fixture
def bucket(server: s3.Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A folder of the test's own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name.replace('[', '-').rstrip(']')}"


def make_bucket(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    files = remote._filesystem("s3")
    for _ in range(50):
        try:
            files.mkdir("bucket")
            return
        except OSError:
            time.sleep(0.2)  # the server is not ready to write
    raise AssertionError("no bucket")


def damage(folder: Remote, how: str) -> None:
    data = (folder / "__1_0.distcp").read_bytes()
    if how == "short":
        (folder / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    elif how == "deleted":
        (folder / "__1_0.distcp").unlink()
    else:
        (folder / "__1_0.distcp").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def go_through_a_run(place: str) -> None:
    ranks = cpu_ranks()
    store = Store(folder_at(place + "/checkpoints"), ranks)
    assert store.newest() is None
    for step in range(1, 6):
        saved = store.save(step, state("shard", 2, step), {"kind": "scheduled"})
    store.prune(Policy(3))
    assert [one.step for one in store.all()] == [3, 4, 5]
    assert find(place, ranks) == saved == store.newest_intact()
    assert store.verify_restore(saved, state("shard", 2, 5)).different == []
    store.write_scores(saved, {"rank": ranks.rank})
    assert store.scores(saved) == {"rank": 0}
    for step, how in [(5, "short"), (4, "a bit")]:
        if ranks.rank == 0:
            damage(Remote(f"{place}/checkpoints/step-00000{step}"), how)
        ranks.barrier()
    newest = store.newest_intact()
    assert newest is not None and newest.step == 3
    found = state("shard", 2)
    store.load(newest, found)
    assert_holds(found, 3)
    with pytest.raises(Refusal, match="it was found damaged: __1_0"):
        find_intact(f"{place}/checkpoints/step-000004", ranks)
    store.save(4, state("shard", 2, 7), {"kind": "scheduled"})
    store.load(store.all()[-1], found)
    assert_holds(found, 7)


@needs_server
@pytest.mark.torch211
def test_a_store(bucket: str) -> None:
    run_ranks(2, go_through_a_run, bucket, group=True, timeout=120)


def look_after(place: str) -> list[int]:
    store = Store(Remote(f"{place}/checkpoints"), Ranks.alone())
    for step in (1, 2, 3):
        store.save(step, state("plain", 1, step), {"kind": "scheduled", "config": {"checkpoint.keep": 3}})
    target = f"{place}/copies"
    commands = [
        ("list", place),
        ("verify", place),
        ("diff", place, f"{place}/checkpoints/step-000001"),
        ("copy", place, target),
        ("verify", target),
        ("prune", place, "--keep", "1", "--yes"),
    ]
    codes = [main(list(words)) for words in commands]
    assert [saved.step for saved in store.all()] == [3]
    assert not Remote(f"{place}/checkpoints/step-000001").exists()
    damage_one = Remote(f"{target}/step-000003/__0_0.distcp")
    damage_one.write_bytes(damage_one.read_bytes()[:-1] + b"!")
    return [*codes, main(["verify", target])]


@needs_server
def test_the_script(bucket: str) -> None:
    assert run_ranks(1, look_after, bucket) == [[0, 0, 1, 0, 0, 0, 1]]


def list_many(place: str) -> None:
    files = remote._filesystem("s3")
    many = {f"{place}/step-000001/file-{number:04d}".removeprefix("s3://"): b"x" for number in range(1001)}
    many |= {f"{place}/step-{number:06d}/.metadata".removeprefix("s3://"): b"index" for number in range(2, 1012)}
    files.pipe(many)
    assert len(Remote(f"{place}/step-000001").sizes()) == 1001
    assert [number for number, _ in folders.steps_in(Remote(place))] == list(range(1, 1012))
    saved_files = {f"file-{number:04d}": folders.hash_bytes(b"x") for number in range(1001)}
    folders.complete(Remote(f"{place}/step-000001"), 1, {}, saved_files)
    newest = folders.newest(Remote(place), before=2)
    assert newest is not None and len(newest.files) == 1001
    folders.remove(newest.folder)
    assert Remote(f"{place}/step-000001").sizes() == {}


@needs_server
@pytest.mark.slow
def test_more_than_1000_objects_and_folders(bucket: str) -> None:
    run_ranks(1, list_many, bucket, timeout=120)


# ---- a server that fails


class Failing(http.server.ThreadingHTTPServer):
    """Passes on what it is asked, but does the first tries of each request wrong. how: 500 | 503 | slow | truncated."""

    def __init__(self, endpoint: str, how: str, tries: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.endpoint, self.how, self.tries = endpoint, how, tries
        self.seen: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Passing(http.server.BaseHTTPRequestHandler):
    server: Failing
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen[f"{self.command} {self.path}"] += 1
        wrong = self.server.seen[f"{self.command} {self.path}"] <= self.server.tries
        if wrong and self.server.how in ("500", "503"):
            self._answer(int(self.server.how), {}, b"")
            return
        if wrong and self.server.how == "slow":
            time.sleep(1.5)
        request = urllib.request.Request(self.server.endpoint + self.path, body or None, method=self.command)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                request.add_unredirected_header(name, value)  # the host too: it is signed
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, headers, data = answer.status, dict(answer.headers), answer.read()
        except HTTPError as answer:
            status, headers, data = answer.code, dict(answer.headers), answer.read()
        cut = wrong and self.server.how == "truncated" and self.command == "GET"
        self._answer(status, headers, data, cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut


def save_and_load(place: str) -> None:
    store = Store(folder_at(place), Ranks.alone())
    for step in (1, 2):
        store.save(step, state("plain", 1, step), {"kind": "scheduled"})
    store.prune(Policy(1))
    [saved] = store.all()
    assert store.newest_intact() == saved and saved.step == 2
    found = state("plain", 1)
    store.load(saved, found)
    assert_holds(found, 2)


@needs_server
@pytest.mark.slow
@pytest.mark.parametrize("how", ["500", "503", "slow", "truncated"])
def test_a_server_that_fails_at_first(
    server: s3.Server, bucket: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    failing = Failing(server.endpoint, how, tries=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{failing.server_port}")
    run_ranks(1, save_and_load, bucket, timeout=200)
    failing.shutdown()
    assert max(failing.seen.values()) > 1


# ---- a run


@needs_server
@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoints(runs: Runs, bucket: str) -> None:
    words = f"checkpoint.dir={bucket} checkpoint.keep=2 parallel=fsdp2"
    outcomes = runs.start("at-a-url", words, partial(hit_in_step, 7, SIGTERM), ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0] and runs.status("at-a-url")["state"] == "saved"
    said = runs.finish("at-a-url", words, ranks=2)
    assert f"going on from {bucket}/step-00000" in said
    runs.finish("on-a-disk", "parallel=fsdp2", ranks=2)
    assert runs.records("at-a-url") == runs.records("on-a-disk")
    assert not (runs.folder("at-a-url") / "checkpoints").exists()
    assert runs.start("from-a-url", f"checkpoint.load={bucket} checkpoint.load_parts=all steps=13")[0].code == 0


@needs_server
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "another-secret"}, "s3://bucket"),
        pytest.param({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "127.0.0.1:9", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_reached_is_refused_and_no_secret_said(
    runs: Runs, bucket: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = runs.start("unreachable", f"checkpoint.dir={bucket}", shorter_waits, timeout=120)[0]
    assert outcome.code == REFUSED, outcome
    assert "checkpoint.dir=s3://bucket" in outcome.said and reason in outcome.said
    assert "Traceback" not in outcome.said
    for secret in (s3.SECRET, "another-secret"):
        assert secret not in outcome.said


def shorter_waits() -> None:
    remote.WAITS = (0.1,)


@needs_server
def test_secrets_of_the_environment_are_in_no_file(runs: Runs, bucket: str) -> None:
    runs.finish("secretive", f"checkpoint.dir={bucket} steps=3 evals=none")
    left = [path for path in runs.folder("secretive").rglob("*") if path.is_file()]
    assert left
    for path in left:
        assert s3.SECRET.encode() not in path.read_bytes(), path
    [manifest] = run_ranks(1, read_text, f"{bucket}/step-000003/manifest.json")
    assert s3.SECRET not in manifest and json.loads(manifest)["step"] == 3


def read_text(place: str) -> str:
    return Remote(place).read_bytes().decode()
