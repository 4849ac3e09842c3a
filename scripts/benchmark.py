"""The framework's step beside that of a plain PyTorch loop, which trains the same model on the same batches:

python -m scripts.benchmark [--ranks N] [--pairs 30] [key=value ...]

Both live in one process and take turns, A B A B, so that what else the machine does falls on both. A is train.py's own
loop (training/loop.py) with all it does in a step: waiting for data, seeding, the step, metrics and their files, the
poll for signals. B is scripts/plain_loop.py: what one writes by hand. It gets A's batches ready-made and starts from
the same weights.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, cast

from models.config import ModelConfig
from scripts.startup import EndedEarly, first_step, launcher, running
from training.check import accumulation, check
from training.compose import compose, refusing
from training.config import Config, OptimizerKind
from training.files import write_json
from training.keys import show
from training.metrics import records
from training.metrics.console import table
from training.nearby import counted
from training.refusal import Problem, Refusal
from training.resolve import World, resolve

if TYPE_CHECKING:  # the process that starts the others needs no torch
    from scripts.plain_loop import PlainLoop
    from training.data.batches import Batch, Batches
    from training.ranks import Ranks
    from training.schedule import Schedule

LEVEL = 0.95
LEAST_PAIRS = 6  # fewer have no interval of this level


def median_interval(values: list[float], level: float = LEVEL) -> tuple[float, float]:
    """An interval that holds the median of what the values are drawn from, with at least this confidence and without
    an assumption on its shape: the k-th smallest and the k-th largest, k by the binomial distribution (David and
    Nagaraja, Order Statistics, 2003, section 7.1). Raises ValueError for too few values."""
    n, k, outside = len(values), 0, 0.0  # outside: the chance that fewer than k + 1 values are below the median
    while outside + math.comb(n, k) / 2**n <= (1 - level) / 2:
        outside += math.comb(n, k) / 2**n
        k += 1
    if k == 0:
        raise ValueError(f"{n} values are too few for an interval of {level:.0%}")
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


# ---- what runs in the processes that are measured


class Measured(Exception):
    """Ends the framework's loop before it saves a last checkpoint."""


class Alternating:
    """The run's batches, between which the plain loop takes its steps. `seconds`: of the framework's and of the plain
    loop's step, a pair for each after the first `warmup`."""

    def __init__(
        self, batches: "Batches", plain: "PlainLoop", schedule: "Schedule", ranks: "Ranks", pairs: int, warmup: int
    ) -> None:
        self.batches, self.plain, self.schedule, self.ranks = batches, plain, schedule, ranks
        self.pairs, self.warmup = pairs, warmup
        self.seconds: list[tuple[float, float]] = []

    @property
    def wait_seconds(self) -> float:
        return self.batches.wait_seconds

    def iterate(self, first_step: int, tokens_consumed: int) -> Generator["Batch", None, None]:
        source = self.batches.iterate(first_step, tokens_consumed)
        try:
            for number in range(self.warmup + self.pairs):
                began = self._now()
                batch = next(source)
                yield batch  # the framework's step is taken, and all that its loop does after it
                between = self._now()
                self.plain.step(batch, self.schedule.lr(batch.step))
                ended = self._now()
                if number >= self.warmup:
                    self.seconds.append((between - began, ended - between))
            raise Measured
        finally:
            source.close()

    def _now(self) -> float:
        """The time when every rank has done all that it was given."""
        import torch

        if self.batches.device.type == "cuda":
            torch.cuda.synchronize(self.batches.device)
        self.ranks.barrier()
        return perf_counter()


def measure_pairs(words: list[str], pairs: int, warmup: int, result: Path) -> None:
    """A child process, or a rank of several."""
    import torch.distributed as dist

    from scripts.plain_loop import PlainLoop
    from training.build import assemble, read_text
    from training.check import settle
    from training.loop import train
    from training.place import connect, find_place

    config, chosen = compose(words)
    place = find_place(config, settle(config, chosen))
    place.folder.path.mkdir(parents=True, exist_ok=True)
    text = read_text(config, place)
    connect(config, place)
    run = assemble(config, chosen, place, text)
    plain = PlainLoop(config, place)
    turns = Alternating(run.batches, plain, run.schedule, place.ranks, pairs, warmup)
    run.writers.start(1)
    with suppress(Measured):
        train(replace(run, batches=cast("Batches", turns)), 0)
    run.writers.close()
    each_rank = place.ranks.gather([float(loss) for loss in plain.losses])
    losses = [statistics.mean(step) for step in zip(*each_rank, strict=True)]
    if place.rank == 0:
        ours = [record["loss"] for record in records.read(place.folder.path / "metrics.jsonl")]
        apart = [abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=False)]
        write_json(
            result, {"seconds": turns.seconds, "losses_apart": apart, "losses": [ours[-1], losses[len(ours) - 1]]}
        )
    if dist.is_initialized():
        dist.destroy_process_group()


def start_plain(words: list[str], result: Path) -> None:
    """A child process, or a rank of several: the plain loop alone, up to its first step."""
    import torch
    import torch.distributed as dist

    from scripts.plain_loop import PlainLoop
    from training.build import build_batches, read_text
    from training.check import settle
    from training.memory import used_bytes
    from training.place import connect, find_place

    config, chosen = compose(words)
    place = find_place(config, settle(config, chosen))
    text = read_text(config, place)
    connect(config, place)
    plain = PlainLoop(config, place)
    plain.step(build_batches(config, place, text).at(0), config.optimizer.lr)
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    place.ranks.barrier()
    if place.rank == 0:
        write_json(result, {"memory_bytes": used_bytes(place.device)})
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- what starts them


def run_child(ranks: int, options: list[str], words: list[str]) -> None:
    command = [*launcher(ranks), "-m", "scripts.benchmark", *options, *words]
    subprocess.run(command, cwd=Path(__file__).parent.parent, stdin=subprocess.DEVNULL, check=True)


def problems_of(config: Config) -> list[Problem]:
    """What the plain loop has not."""
    found = []
    if config.optimizer.kind is not OptimizerKind.adamw:
        found.append(Problem("optimizer", config.optimizer.kind.name, "the plain loop has AdamW", "optimizer=adamw"))
    if config.parallel.tp > 1:
        found.append(Problem("parallel.tp", config.parallel.tp, "the plain loop has none", "parallel.tp=1"))
    default = ModelConfig()
    for name in ("kv_heads", "fused_qkv", "logit_softcap", "z_loss", "x0", "skips", "value_embeddings"):
        value = getattr(config.model, name)
        if value != getattr(default, name):
            instead = f"model.{name}={show(getattr(default, name))}"
            found.append(Problem(f"model.{name}", value, "the plain loop has GPT-2's", instead))
    if config.model.dropout > 0:
        found.append(Problem("model.dropout", config.model.dropout, "the plain loop has none", "model.dropout=0"))
    if not isinstance(config.micro_batch, int):
        found.append(Problem("micro_batch", config.micro_batch, "must be the same in both loops", "micro_batch=8"))
    if config.parallel.cpu_offload:
        found.append(Problem("parallel.cpu_offload", True, "the plain loop has none", "parallel.cpu_offload=false"))
    return found


def benchmark(ranks: int, pairs: int, warmup: int, words: list[str], folder: Path) -> str:
    """The table. Raises Refusal, EndedEarly and subprocess.CalledProcessError."""
    steps = warmup + pairs + 1  # the last would save
    words = [
        *words,
        *(f"steps={steps}", "name=benchmark", "metrics.console=false", "metrics.sample_tokens=0", "evals.tasks=[]"),
        *("evals.every=0", "checkpoint.every=0", "checkpoint.permanent_every=0", "checkpoint.test_restore=never"),
    ]
    config, chosen = compose(words)
    world = World(ranks, ranks)
    resolve(config, world, chosen)
    if problems := check(config, world) or problems_of(config):
        raise Refusal(problems)

    first, second, third = (folder / name for name in ("framework", "plain", "pairs"))
    for place in (first, second, third):
        place.mkdir()
    with first_step(ranks, words, first) as (our_start, our_memory):
        pass
    result = second / "result.json"
    child = [*launcher(ranks), "-m", "scripts.benchmark", "--child", "plain", "--result", str(result), *words]
    with running([*child, f"out={second}"], result.exists, second / "log") as their_start:
        their_memory = json.loads(result.read_text())["memory_bytes"]
    result = third / "result.json"
    options = ["--child", "pairs", "--result", str(result), "--pairs", str(pairs), "--warmup", str(warmup)]
    run_child(ranks, options, [*words, f"out={third}"])
    found = json.loads(result.read_text())

    assert config.batch_sequences is not None and config.sequence_length is not None
    tokens = config.batch_sequences * config.sequence_length
    ours, theirs = zip(*found["seconds"], strict=True)
    ratios = [a / b for a, b in found["seconds"]]
    low, high = median_interval(ratios)
    rows = [
        ["step, median (s)", *(f"{statistics.median(seconds):.4f}" for seconds in (ours, theirs))],
        ["tokens a second", *(f"{tokens / statistics.median(seconds):,.0f}" for seconds in (ours, theirs))],
        ["command to first step (s)", f"{our_start:.1f}", f"{their_start:.1f}"],
        ["peak memory alone, rank 0 (GiB)", f"{our_memory / 2**30:.2f}", f"{their_memory / 2**30:.2f}"],
    ]
    micro_batches = counted(accumulation(config, world), "micro-batch")
    return "\n".join(
        [
            f"{config.parallel.strategy.name} on {counted(ranks, 'rank')}, {tokens:,} tokens a step, on each rank "
            f"{micro_batches} of {config.micro_batch} x {config.sequence_length} tokens",
            table([["", "framework", "plain loop"]], rows),
            f"framework / plain loop, time of a step: median {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f} "
            f"with {LEVEL:.0%} confidence), {pairs} pairs; of all steps together {sum(ours) / sum(theirs):.4f}",
            f"losses: largest relative difference {max(found['losses_apart']):.1e} over {len(found['losses_apart'])} "
            f"steps; at the last of them {found['losses'][0]:.5f} and {found['losses'][1]:.5f}",
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks, started by torchrun where there are several")
    parser.add_argument(
        "--pairs", type=int, default=30, help=f"steps of each that are measured, at least {LEAST_PAIRS}"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before these")
    parser.add_argument("--child", choices=["pairs", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for train.py")
    given = parser.parse_args(arguments)
    if given.pairs < LEAST_PAIRS:
        parser.error(f"--pairs must be at least {LEAST_PAIRS}")
    with refusing():
        if given.child == "pairs":
            measure_pairs(given.words, given.pairs, given.warmup, given.result)
        elif given.child == "plain":
            start_plain(given.words, given.result)
        else:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    print(benchmark(given.ranks, given.pairs, given.warmup, given.words, Path(folder)))
                except EndedEarly as error:
                    print(error, file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
