"""Kills a run at random instants, again and again, and compares what it ends with with a run that nobody touched:

python -m scripts.fault_drill [--kills 10] [--ranks 2] [--seed 0] [--folder drill] [key=value ...]

An instant lies anywhere in the time that the whole run takes; who is killed with SIGKILL is one of the ranks or their
launcher, and with it the rest of the host. Each time the same command goes on. Exit code 1 where anything differs: a
value of the last checkpoint, a step in the metrics; or where a checkpoint that says it is complete is not.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from scripts.startup import ROOT, launcher
from training.checkpoint import folders, storage
from training.metrics import records

DEFAULTS = "steps=40 batch_sequences=8 precision=fp32 checkpoint.every=5 evals.every=10 metrics.sample_tokens=0"
END_SECONDS = 30.0  # for what is left of a host after a kill


class Differs(Exception):
    """The run is not what the untouched one is."""


def start(ranks: int, words: list[str], name: str, folder: Path) -> subprocess.Popen[bytes]:
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [*launcher(ranks), "train.py", *words, f"out={folder}", f"name={name}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def children(parent: int) -> list[int]:
    """Processes that it has started, by Linux's /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found += [int(path.parent.name)] if int(fields[1]) == parent else []
    return sorted(found)


def kill_one(process: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Who was killed. torchrun ends the other ranks; what outlives their launcher is killed too."""
    victims = {"the launcher": process.pid} | {f"rank {n}": pid for n, pid in enumerate(children(process.pid))}
    who = chance.choice(list(victims))
    os.kill(victims[who], signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    for pid in victims.values():  # as when the machine is gone
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return who if len(victims) > 1 else "the run"


def check_readable(run: Path) -> None:
    for marker in sorted(run.glob(f"checkpoints/step-*/{folders.MARKER}")):
        saved = folders.read(marker.parent)
        if wrong := storage.faults(saved.folder, saved.files):
            raise Differs(f"{saved.folder} says it is complete: {'; '.join(wrong)}")


def check_same(run: Path, whole: Path) -> None:
    """The files of the last checkpoint bit by bit, and every step in the metrics once."""
    last = [folders.newest(path / "checkpoints") for path in (run, whole)]
    if last[0] is None or last[1] is None or last[0].step != last[1].step:
        raise Differs(f"{run} and {whole} end with the checkpoints {last}")
    different = [name for name in last[1].files if last[0].files.get(name) != last[1].files[name]]
    if different:
        raise Differs(f"{last[0].folder} has other bytes than {last[1].folder} in {', '.join(different)}")
    steps, expected = ([record["step"] for record in records.read(path / "metrics.jsonl")] for path in (run, whole))
    if steps != expected:
        raise Differs(f"{run / 'metrics.jsonl'} has the steps {steps}")


def drill(ranks: int, kills: int, seed: int, words: list[str], folder: Path) -> None:
    """Raises Differs."""
    chance, done, runs = random.Random(seed), 0, 0
    began = time.monotonic()
    if start(ranks, words, "whole", folder).wait() != 0:
        raise Differs(f"the untouched run failed; {folder / 'whole.log'} says why")
    seconds = time.monotonic() - began
    print(f"the untouched run took {seconds:.0f} s; {kills} kills follow", flush=True)
    while done < kills:
        name, killed, runs = f"killed-{runs}", 0, runs + 1
        while True:
            process = start(ranks, words, name, folder)
            try:
                code = process.wait(chance.uniform(0, seconds) if done + killed < kills else None)
            except subprocess.TimeoutExpired:
                who = kill_one(process, chance)
                killed += 1
                check_readable(folder / name)
                print(f"kill {done + killed}: {who}, at step {newest_step(folder / name)}", flush=True)
                continue
            if code != 0:
                raise Differs(f"{name} ended with {code}; {folder / name}.log says why")
            break
        check_same(folder / name, folder / "whole")
        done += killed
        print(f"{name} was killed {killed} times and is the untouched run, bit by bit", flush=True)


def newest_step(run: Path) -> int:
    return max((record["step"] for record in records.read(run / "metrics.jsonl")), default=0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.fault_drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and of who is killed")
    parser.add_argument("--folder", type=Path, default=Path("drill"), help="of the runs; must not exist")
    words, overrides = parser.parse_known_args(argv)
    if words.folder.exists():
        parser.error(f"--folder {words.folder} is there already: another one, or remove it")
    if words.kills < 1 or words.ranks < 1:
        parser.error("--kills and --ranks are at least 1")
    words.folder.mkdir(parents=True)
    layout = ["parallel=fsdp2"] if words.ranks > 1 else []
    try:
        drill(words.ranks, words.kills, words.seed, [*layout, *DEFAULTS.split(), *overrides], words.folder.resolve())
    except Differs as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
