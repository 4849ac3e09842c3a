"""Runs a function on several ranks, each a process, in a fraction of a second.

Importing torch with FSDP, DCP and Dynamo takes many seconds, so a server process imports them once and forks the ranks
of each call. The server is a process of its own, not the one pytest runs in: threads do not survive a fork, so what is
forked must never have computed anything, and tests may use torch as they like.
"""

import contextlib
import faulthandler
import gc
import importlib
import itertools
import math
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
IMPORTS = [
    "hydra",
    "hypothesis",
    "numpy",
    "omegaconf",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]
GRACE = 3.0  # seconds that the other ranks have to end or to fail as well, once one has failed
TAIL = 6000  # characters of a rank's output that a failure shows


class RanksFailed(AssertionError):
    """A rank raised, died or hung. The message has the traceback, or the stack, of every rank that did not return.

    first: the rank that failed first.
    """

    def __init__(self, first: int, message: str) -> None:
        super().__init__(message)
        self.first = first


@dataclass(frozen=True)
class _Request:
    """What the server needs for one call. The call stays pickled: only ranks import the module of the function."""

    count: int
    call: bytes
    group: bool
    seconds: float
    folder: Path
    environment: dict[str, str]
    path: list[str]
    cwd: str


@dataclass(frozen=True)
class _Error:
    """What a rank raised. `when` is on a clock that all ranks share."""

    when: float
    text: str


@dataclass(frozen=True)
class _End:
    """How a process ended: by itself, or killed by the server because it hung or waited for others."""

    killed: bool
    text: str


def run_ranks(
    count: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, group: bool = False
) -> list[Any]:
    """Calls function(*args) on `count` ranks and returns what each returned, in the order of ranks.

    function: of a module's top level, so that it can be pickled by name; args and results are pickled too.
    timeout: seconds, from the fork, after which ranks that have not returned are killed and their stacks shown.
    group: makes the default process group (gloo) before the call; else the function makes its own if it needs one.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them; other
    variables, the folder and sys.path are the caller's. Each rank has one thread and starts with random states of its
    own: what must be equal on all ranks may not rely on them. Raises RanksFailed.
    """
    __tracebackhide__ = True
    server = start()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = pickle.dumps((function, args))
        try:
            request = _Request(count, call, group, timeout, folder, dict(os.environ), sys.path, os.getcwd())
            server.connection.send(request)
            ends: dict[int, _End] = server.connection.recv()
        except (EOFError, OSError) as error:
            log = server.read_log()
            stop()
            raise RuntimeError(f"the server of ranks is gone\n{log}") from error
        except BaseException:  # an interrupt, or a test's time limit: the ranks must not live on
            stop()
            raise
        for rank in range(count):
            if text := _read(folder / f"{rank}.log"):
                print(f"--- output of rank {rank} of {count}\n{text}")
        if not all((folder / f"{rank}.result").exists() for rank in range(count)):
            raise _failure(count, ends, folder)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(count)]


def _failure(count: int, ends: dict[int, _End], folder: Path) -> RanksFailed:
    """Tells of each rank that did not return, first of the one that failed first.

    A sudden death comes before the errors, which follow from it, and these before ranks that still waited.
    """
    told: list[tuple[float, int, str]] = []
    for rank in range(count):
        if (folder / f"{rank}.error").exists():
            error: _Error = pickle.loads((folder / f"{rank}.error").read_bytes())
            told.append((error.when, rank, error.text))
        elif not (folder / f"{rank}.result").exists():
            when = math.inf if ends[rank].killed else -math.inf
            output = _read(folder / f"{rank}.log")[-TAIL:]
            told.append((when, rank, f"{ends[rank].text}; the end of its output:\n{output}"))
    told.sort()
    returned = sorted(set(range(count)) - {rank for _, rank, _ in told})
    parts = [f"rank {rank} of {count}: {text.rstrip()}" for _, rank, text in told]
    return RanksFailed(told[0][1], "\n\n".join([*parts, f"returned: {returned or 'none'}"]))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Server:
    """The process that imports and forks. It ends when its connection is closed, so never later than pytest."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the server)
        threads = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.ranks import serve; serve({theirs.fileno()}, {IMPORTS})"],
            cwd=ROOT,
            env={**os.environ, **threads},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        theirs.close()

    def read_log(self) -> str:
        self.log.seek(0)
        return self.log.read()[-TAIL:]

    def close(self) -> None:
        self.connection.close()
        self.process.wait()
        self.log.close()


_server: Server | None = None


def start() -> Server:
    """The server, started if it does not run. It imports while the caller goes on."""
    global _server
    if _server is None:
        _server = Server()
    return _server


def stop() -> None:
    """Ends the server and any ranks that run. The next call starts another."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


# ---- what runs in the server


def serve(descriptor: int, imports: list[str]) -> None:
    connection = Connection(descriptor)
    for name in imports:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()
    while True:
        try:
            request = connection.recv()
            ends = _run(request, connection)
        except EOFError:  # pytest has closed the connection, or has ended
            return
        connection.send(ends)


def _run(request: _Request, connection: Connection) -> dict[int, _End]:
    """Forks the ranks and waits for them. Returns how their processes ended."""
    port = _free_port()
    ranks: dict[int, int] = {}
    try:
        for rank in range(request.count):
            pid = os.fork()
            if pid == 0:
                _be_rank(request, rank, port)
            os.setpgid(pid, pid)
            ranks[rank] = pid
        return _wait(request, ranks, connection)
    finally:
        for pid in ranks.values():  # with whatever processes the rank has started
            _signal_group(pid, signal.SIGKILL)


def _wait(request: _Request, ranks: dict[int, int], connection: Connection) -> dict[int, _End]:
    deadline = time.monotonic() + request.seconds
    running = dict(ranks)
    ends: dict[int, _End] = {}
    while running and time.monotonic() < deadline:
        if all((request.folder / f"{rank}.result").exists() for rank in ranks):
            (request.folder / "done").touch()
        for rank, pid in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[rank]
                ends[rank] = _End(False, _describe(os.waitstatus_to_exitcode(status)))
                if not (request.folder / f"{rank}.result").exists():
                    deadline = min(deadline, time.monotonic() + GRACE)
        if connection.poll(0.005):  # nothing is sent during a call, so this is its end
            raise EOFError
    for rank, pid in running.items():
        ends[rank] = _End(True, "hung" if len(running) == len(ranks) else "still waited when others had ended")
        os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks
    for pid in running.values():
        _reap(pid)
    return ends


def _reap(pid: int, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _describe(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} before it returned"


_ports = itertools.count(random.randrange(1_000))


def _free_port() -> int:
    """Below those the system gives to whoever asks for any, and from another range in each process of pytest-xdist."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1_000 * (worker % 20) + next(_ports) % 1_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# ---- what runs in a rank


def _be_rank(request: _Request, rank: int, port: int) -> NoReturn:
    code = 1
    try:
        _set_up(request, rank, port)
        function, args = pickle.loads(request.call)
        if request.group:
            _make_group()
        _write(request.folder / f"{rank}.result", function(*args))
        while not (request.folder / "done").exists():  # rank 0 holds the store that others may still need
            time.sleep(0.005)
        code = 0
    except BaseException as error:
        _write(request.folder / f"{rank}.error", _Error(time.monotonic(), _tell(error)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_up(request: _Request, rank: int, port: int) -> None:
    os.setpgid(0, 0)
    log = os.open(request.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log, all_threads=True)
    os.environ.clear()
    os.environ.update(request.environment)
    count = str(request.count)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(request.cwd)
    sys.path[:] = request.path
    random.seed(rank + 1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank + 1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(rank + 1)


def _make_group() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def _write(path: Path, value: Any) -> None:
    beside = path.with_suffix(".part")
    beside.write_bytes(pickle.dumps(value))
    beside.replace(path)


def _tell(error: BaseException) -> str:
    """The traceback; for a bare assertion also the variables around it, since pytest does not rewrite it here."""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, AssertionError) or str(error) or error.__traceback__ is None:
        return text
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    values = [f"    {name} = {_show(value)}" for name, value in last.tb_frame.f_locals.items()]
    return text + "where\n" + "\n".join(values)


def _show(value: object) -> str:
    try:
        return repr(value)[:300]
    except Exception as error:  # a repr is any code
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
