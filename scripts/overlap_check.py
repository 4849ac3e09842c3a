"""How much of the time in which rows go to experts on other ranks DualPipeV hides behind another micro-batch:

torchrun --nproc-per-node 4 -m scripts.overlap_check [--device cuda] [--small]

Says the seconds of a step in which each forward pass is paired with a backward pass and they take turns, of one in
which they follow each other, what of the latter are exchanges of rows, and how much of that the turns save. Exit code 2
where there is no such device.
"""

import argparse
import os
import sys
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallel.bubble import Clock
from parallel.overlap import OverlappedExchange
from scripts.gpu_check import MEASURED, WARMUP, Trained
from training.compose import refusing

LAYOUT = "parallel=fsdp2 parallel.pp=2 parallel.reshard_after_forward=false parallel.schedule=dualpipev compile=none"
FULL = (
    "model=gpt2_350m model.moe.experts=16 model.moe.forced_balance=true sequence_length=1024 batch_sequences=64 "
    "micro_batch=4 precision=bf16"
)
SMALL = "model=moe_debug sequence_length=16 batch_sequences=8 micro_batch=1 precision=fp32"


def measure(words: str, device: str) -> tuple[float, float, float]:
    """On this rank: seconds of a step by turns, of one whose passes follow each other, and of the exchanges in that."""
    trained = Trained(words, device)
    try:
        pipeline = trained.step.spread.pipeline
        assert pipeline is not None
        by_turns = seconds_of_step(trained)
        pipeline.turns = None
        pipeline.schedules.clear()
        one_by_one = seconds_of_step(trained)
        return by_turns, one_by_one, seconds_in_exchanges(trained)
    finally:
        trained.close()


def seconds_of_step(trained: Trained) -> float:
    for _ in range(WARMUP):
        trained.take()
    trained.wait()
    began = perf_counter()
    for _ in range(MEASURED):
        trained.take()
    trained.wait()
    return (perf_counter() - began) / MEASURED


def seconds_in_exchanges(trained: Trained) -> float:
    """Of a step, from where each begins to where what it brings is there."""
    clock, move = Clock(trained.place.device), OverlappedExchange.move

    def timed(*args: Any) -> Tensor:
        with clock.during("busy"):
            return move(*args)

    with patch.object(OverlappedExchange, "move", timed):
        trained.take()
        trained.wait()
    return clock.read()[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.overlap_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the script itself")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; nothing was measured", file=sys.stderr)
        return 2
    words = f"{SMALL if given.small else FULL} {LAYOUT} parallel.ep={int(os.environ['WORLD_SIZE']) // 2}"
    with refusing():
        by_turns, one_by_one, exchanges = measure(words, given.device)
    if os.environ["RANK"] == "0":
        print(f"a step: {by_turns:.4f} s by turns, {one_by_one:.4f} s one by one, of which exchanges {exchanges:.4f} s")
        print(f"hidden: {(one_by_one - by_turns) / exchanges:.0%} of the exchanges", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
