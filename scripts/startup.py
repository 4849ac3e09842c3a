"""Seconds from the command to the first step of train.py, and what it imports until then:

python -m scripts.startup [--ranks N] [--repeat 3] [key=value ...]
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from training.metrics import records
from training.metrics.console import table

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.01
END_SECONDS = 60.0  # for a process to save and end after SIGTERM
LEAST_SECONDS = 0.1  # of imports that are listed
IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)$", re.MULTILINE)  # what python -X importtime writes
ERRORS_OF_RANK_0 = "**/attempt_0/0/stderr.log"  # where torchrun redirects it to


class EndedEarly(Exception):
    """The process ended before what was waited for; the message is the end of its output."""


def launcher(ranks: int, *options: str) -> list[str]:
    """The beginning of a command on so many ranks: a Python, or torchrun with its options."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]


@contextmanager
def running(
    command: list[str], until: Callable[[], bool], log: Path, environment: dict[str, str] | None = None
) -> Iterator[float]:
    """Starts the command, its output into `log`, and gives the seconds until `until()` is true; then, when the block is
    left, ends it. Raises EndedEarly."""
    with open(log, "w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        try:
            while not until():
                if process.poll() is not None and not until():
                    raise EndedEarly(log.read_text(errors="replace")[-4000:])
                time.sleep(POLL_SECONDS)
            yield time.perf_counter() - began
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which torchrun passes on; what does not end then is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def first_step(
    ranks: int, words: list[str], folder: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[float, int]]:
    """Starts train.py on an empty `folder` and gives, after its first step, the seconds until then and the highest
    memory use of rank 0 in bytes. options: of torchrun. Raises EndedEarly."""
    metrics = folder / "run" / "metrics.jsonl"
    command = [*launcher(ranks, *options), "train.py", *words, f"out={folder}", "name=run"]
    with running(command, lambda: bool(records.read(metrics)), folder / "log", environment) as seconds:
        yield seconds, int(records.read(metrics)[0]["memory_bytes"])


def imports(ranks: int, words: list[str], folder: Path) -> str:
    """What rank 0 imports up to the first step, as Python's -X importtime writes it. Raises EndedEarly."""
    redirected = ["--log-dir", str(folder), "--redirects", "2"] if ranks > 1 else []
    with first_step(ranks, words, folder, *redirected, environment={"PYTHONPROFILEIMPORTTIME": "1"}):
        file = next(folder.glob(ERRORS_OF_RANK_0)) if ranks > 1 else folder / "log"
        return file.read_text(errors="replace")


def by_package(profile: str) -> list[tuple[str, float, int]]:
    """(package, seconds, modules) from Python's import times, the slowest first. Of torch the second name counts too;
    a package's seconds are its modules' own, not those of what they import."""
    seconds: dict[str, float] = defaultdict(float)
    modules: dict[str, int] = defaultdict(int)
    for microseconds, name in IMPORT.findall(profile):
        parts = name.split(".")
        package = ".".join(parts[: 2 if parts[0] == "torch" else 1])
        seconds[package] += int(microseconds) / 1e6
        modules[package] += 1
    return sorted(((name, spent, modules[name]) for name, spent in seconds.items()), key=lambda row: -row[1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.startup", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="ranks, started by torchrun where there are several")
    parser.add_argument("--repeat", type=int, default=3, help="starts, of which the median is shown")
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for train.py")
    given = parser.parse_args(arguments)
    try:
        starts = []
        for _ in range(given.repeat):
            with (
                tempfile.TemporaryDirectory() as folder,
                first_step(given.ranks, given.words, Path(folder)) as measured,
            ):
                starts.append(measured)
        with tempfile.TemporaryDirectory() as folder:
            packages = by_package(imports(given.ranks, given.words, Path(folder)))
    except EndedEarly as error:
        print(error, file=sys.stderr)
        return 1
    seconds = sorted(seconds for seconds, _ in starts)
    print(f"{given.ranks} x train.py {' '.join(given.words)}".rstrip())
    print(f"  command to first step: {statistics.median(seconds):.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f})")
    print(f"  peak memory of rank 0: {max(memory for _, memory in starts) / 2**30:.2f} GiB")
    rows = [[name, f"{spent:.2f}", str(count)] for name, spent, count in packages if spent >= LEAST_SECONDS]
    print(table([["imported by rank 0", "seconds", "modules"]], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
