"""What a checkpoint costs the steps, written in the background and waited for, beside the bare write of its bytes:

python -m scripts.benchmark_saving [--saves 8] [--between 8] [key=value ...]

One process trains with train.py's own loop. In turns it saves in the background, saves and waits, and writes as many
bytes to one file and syncs it. A stall is the time of the steps from a save on, up to the next, beyond that of steps
that no save touches; before the next step is what `save_stall_seconds` has of it: the rest is what writing takes from
the steps that go on. The default model has 500 MB of state: float32 weights and two moments each.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scripts.benchmark import LEAST_PAIRS, Measured, median_interval
from training.compose import compose, refusing
from training.metrics import records
from training.metrics.console import table

if TYPE_CHECKING:
    from training.checkpoint.background import Background
    from training.data.batches import Batch
    from training.loop import Run

MODEL = (
    "model.layers=12 model.dim=512 model.heads=8 model.context=64 tokenizer=bytes batch_sequences=1 micro_batch=1 "
    "model.vocab_multiple=7168 compile=none precision=fp32"
)


class Turns:
    """The run's batches, between which the way to save changes and bare writes are made. The first save of each kind is
    not counted: it allocates and imports."""

    def __init__(self, run: "Run", background: "Background", saves: int, between: int, folder: Path) -> None:
        self.run, self.background, self.saves, self.between, self.folder = run, background, saves, between, folder
        self.wait_seconds = 0.0
        self.steps: dict[bool, list[list[float]]] = {True: [], False: []}  # seconds from each save on, by background
        self.bare: list[float] = []
        self.stood: dict[bool, list[float]] = {True: [], False: []}  # seconds that no step was taken, from the metrics
        self.bytes = 0

    def iterate(self, first_step: int, tokens_consumed: int) -> Generator["Batch", None, None]:
        from training.loop import settle

        source = self.run.batches.iterate(first_step, tokens_consumed)
        checkpoints = self.run.checkpoints
        try:
            for number, batch in enumerate(source, 1):
                began = time.perf_counter()
                yield batch  # the step is taken, and the save that is due after it
                seconds = time.perf_counter() - began
                if number % self.between == 0:
                    self.steps[checkpoints.background is not None].append([])
                if number >= self.between:
                    self.steps[checkpoints.background is not None][-1].append(seconds)
                if (number + 1) % self.between == 0 and number > self.between:  # the next step saves
                    settle(self.run)  # what it waits, the next save would
                    self.steps[checkpoints.background is not None][-1][-1] = time.perf_counter() - began
                    in_background = checkpoints.background is not None
                    if not in_background:
                        self.bare.append(self.write_bare())
                        if len(self.bare) > self.saves:
                            raise Measured
                    checkpoints.background = None if in_background else self.background
            raise AssertionError("the batches ended before the run")
        finally:
            source.close()

    def write_bare(self) -> float:
        """Seconds to write the newest checkpoint's bytes from memory to one file and to sync it."""
        saved = self.run.checkpoints.store.all()[-1]
        parts = [(cast(Path, saved.folder) / name).read_bytes() for name in saved.files]
        self.bytes = sum(map(len, parts))
        path = self.folder / "bare"
        began = time.perf_counter()
        with open(path, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        path.unlink()
        return seconds


def measure(words: list[str], saves: int, between: int, folder: Path) -> Turns:
    from training.build import assemble, read_text
    from training.check import settle as settle_world
    from training.checkpoint.background import Background
    from training.loop import train
    from training.metrics.writers import METRICS_FILE
    from training.place import connect, find_place

    words = [
        *MODEL.split(),
        *words,
        *(
            f"out={folder}",
            f"steps={between * (2 * saves + 4)}",
            f"checkpoint.every={between}",
            "name=saving",
            "metrics.console=false",
        ),
        *("evals.tasks=[]", "checkpoint.test_restore=never", "metrics.every=1", "metrics.tensorboard=false"),
    ]
    config, chosen = compose(words)
    place = find_place(config, settle_world(config, chosen))
    place.folder.path.mkdir(parents=True, exist_ok=True)
    text = read_text(config, place)
    connect(config, place)
    run = assemble(config, chosen, place, text)
    background = Background(place.ranks, place.device)
    turns = Turns(run, background, saves, between, folder)
    run.checkpoints.background = background
    run.writers.start(1)
    measured = replace(run, batches=cast("object", turns))  # type: ignore[arg-type]
    turns.run = replace(measured, batches=run.batches)
    with suppress(Measured):
        train(measured, 0)
    run.writers.close()
    stood = {
        line["step"]: line.get("save_stall_seconds", 0.0) for line in records.read(place.folder.path / METRICS_FILE)
    }
    for number in range(3, 2 * saves + 3):  # the first of each kind is not counted
        turns.stood[number % 2 == 1].append(stood[number * between + 1])
    return turns


def told(turns: Turns) -> str:
    kinds = {kind: windows[1:] for kind, windows in turns.steps.items()}
    untouched = statistics.median(seconds for window in kinds[False] for seconds in window[1:])
    stalls = {kind: [sum(window) - len(window) * untouched for window in windows] for kind, windows in kinds.items()}
    rows = [
        ["stall, saved in the background (s)", *_figures(stalls[True])],
        ["  of it before the next step (s)", *_figures(turns.stood[True])],
        ["stall, waited for (s)", *_figures(stalls[False])],
        ["  of it before the next step (s)", *_figures(turns.stood[False])],
        ["bare synced write (s)", *_figures(turns.bare[1:])],
    ]
    background, waited, bare = (statistics.median(s) for s in (stalls[True], stalls[False], turns.bare[1:]))
    return "\n".join(
        [
            f"{turns.bytes / 1e6:,.0f} MB; a step that no save touches: {untouched:.3f} s",
            table([["", "median", "95 % interval"]], rows),
            f"in the background / waited for: {background / waited:.2f}; waited for / bare write: {waited / bare:.2f}",
        ]
    )


def _figures(seconds: list[float]) -> list[str]:
    low, high = median_interval(seconds)
    return [f"{statistics.median(seconds):.3f}", f"{low:.3f} to {high:.3f}"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmark_saving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--saves", type=int, default=8, help=f"of each kind, at least {LEAST_PAIRS}")
    parser.add_argument("--between", type=int, default=8, help="steps from one save to the next")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; else a temporary one")
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for train.py")
    given = parser.parse_args(arguments)
    if given.saves < LEAST_PAIRS:
        parser.error(f"--saves must be at least {LEAST_PAIRS}")
    with refusing(), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(told(measure(given.words, given.saves, given.between, Path(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
