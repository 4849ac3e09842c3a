"""DualPipeV's pairs with experts on other ranks: one micro-batch computes while rows of the other are under way, and
one that fails ends both. That the run stays the same is tests/parity's."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from models.attention import Attention
from models.config import ModelConfig, MoE
from models.decoder import Block
from models.moe import Experts
from parallel.apply import parallelize
from parallel.bubble import Clock
from parallel.config import (
    ActivationsConfig,
    CompileConfig,
    Dtype,
    ParallelConfig,
    Recompute,
    Schedule,
    Scope,
)
from parallel.mesh import build_mesh, start_process_group
from parallel.overlap import Turns
from parallel.pipeline import Pipeline
from tests.ranks import RanksFailed, run_ranks
from tests.runs.drive import put

CPU = torch.device("cpu")
MICRO_BATCHES = 6
PAIRS = 7  # of each of two ranks: DualPipeV's steps 4 and 5 with 6 micro-batches
OLD = hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")  # torch 2.11, which cannot run it over gloo

# Of a pair whose passes go through a block with experts each, F forward and B backward: their exchanges start and are
# waited for, and modules have computed.
IN_TURN = """
F Attention, F start, B Block, B start, F wait, F Experts, F start, B wait, B Experts, B start, F wait, F Block,
B wait, B Attention
"""


def build() -> Pipeline:
    """Four stages of a block each on two pairs of ranks, which share experts."""
    parallel = ParallelConfig(pp=2, tp=2, ep=2, schedule=Schedule["dualpipev"])
    model = ModelConfig(layers=4, dim=8, heads=2, context=8, vocab_size=11, moe=MoE(experts=4, dim=12))
    start_process_group(CPU, 20)
    mesh = build_mesh(parallel, CPU)
    compile, activations = CompileConfig(Scope.none), ActivationsConfig(Recompute.none)
    spread = parallelize(model, mesh, parallel, Dtype.fp64, Dtype.fp64, compile, activations, 0, CPU)
    assert spread.pipeline is not None
    return spread.pipeline


def step(pipeline: Pipeline) -> None:
    tokens = torch.arange(8).view(1, 8) % 11
    pipeline.backward([{"tokens": tokens, "labels": tokens}] * MICRO_BATCHES, torch.ones(()))


def watch_pairs(begin: Callable[[], None], end: Callable[[], None]) -> None:
    real = Turns.run

    def run(self: Turns, *passes: Callable[[], None]) -> None:
        begin()
        real(self, *passes)
        end()

    put(Turns, "run", run)


def watch_modules(pipeline: Pipeline, kinds: tuple[type[nn.Module], ...], seen: Callable[[str, str], None]) -> None:
    """Calls seen("F" or "B", the kind's name) when such a module has computed, or gets its result's gradient."""

    def watch(module: nn.Module, _: Any, output: Tensor) -> None:
        name = next(kind.__name__ for kind in kinds if isinstance(module, kind))
        seen("F", name)
        if output.requires_grad:
            output.register_hook(lambda gradient: seen("B", name))

    for stage in pipeline.passes.values():
        for module in stage.modules():
            if isinstance(module, kinds):
                module.register_forward_hook(watch)


def events_of_pairs() -> list[str]:
    """Of each pair of this rank."""
    pipeline = build()
    found: list[list[str]] = []
    within = False

    def begin() -> None:
        nonlocal within
        within = True
        found.append([])

    def end() -> None:
        nonlocal within
        within = False

    def seen(side: str, what: str) -> None:
        if within:
            found[-1].append(f"{side} {what}")

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            seen(side(), "wait")
            self.work.wait()

    def side() -> str:
        return "F" if threading.current_thread() is threading.main_thread() else "B"

    real = dist.all_to_all_single

    def exchange(*args: Any, **options: Any) -> Watched:
        seen(side(), "start")
        return Watched(real(*args, **options))

    put(dist, "all_to_all_single", exchange)
    watch_pairs(begin, end)
    watch_modules(pipeline, (Attention, Experts, Block), seen)
    step(pipeline)
    return [", ".join(events) for events in found]


@pytest.mark.skipif(OLD, reason="torch 2.11 cannot run it over gloo")
def test_one_micro_batch_computes_while_rows_of_the_other_are_under_way() -> None:
    expected = " ".join(IN_TURN.split())
    for of_rank in run_ranks(4, events_of_pairs):
        assert of_rank == [expected] * PAIRS


def fail_in_a_pair(side: str, rank: int) -> None:
    """An expert of this rank, in the pass of this side of the third pair."""
    pipeline = build()
    pairs = 0

    def begin() -> None:
        nonlocal pairs
        pairs += 1

    def seen(now: str, what: str) -> None:
        if (pairs, now, dist.get_rank()) == (3, side, rank):
            raise ValueError(f"broken expert in {now}")

    watch_pairs(begin, lambda: None)
    watch_modules(pipeline, (Experts,), seen)
    step(pipeline)


@pytest.mark.skipif(OLD, reason="torch 2.11 cannot run it over gloo")
@pytest.mark.parametrize(("side", "rank"), [("F", 1), ("B", 1), ("F", 2)])
def test_an_expert_that_fails_in_either_pass_ends_the_run(side: str, rank: int) -> None:
    with pytest.raises(RanksFailed, match=f"ValueError: broken expert in {side}") as caught:
        run_ranks(4, fail_in_a_pair, side, rank, timeout=30)
    assert caught.value.first == rank
    assert "hung" not in str(caught.value)


def passes(turns: Turns, lengths: tuple[int, int], breaks: str = "") -> list[str]:
    """What a forward and a backward pass do, each in so many parts with the other's turn between them."""
    done: list[str] = []

    def call(side: int) -> None:
        for part in range(lengths[side]):
            if part > 0:
                turns.hand_over(side)
            name = f"{'FB'[side]}{part}"
            done.append(name)
            if name == breaks:
                raise ValueError(name)

    try:
        turns.run(lambda: call(0), lambda: call(1))
    except ValueError as error:
        done.append(f"raised {error}")
    return done


def test_passes_take_turns() -> None:
    turns = Turns(CPU)
    assert passes(turns, (3, 3)) == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert passes(turns, (1, 3)) == ["F0", "B0", "B1", "B2"]
    assert passes(turns, (3, 1)) == ["F0", "B0", "F1", "F2"]


@pytest.mark.parametrize(
    ("breaks", "done"),
    [
        ("F0", ["F0"]),
        ("B0", ["F0", "B0"]),
        ("F1", ["F0", "B0", "F1"]),
        ("B2", ["F0", "B0", "F1", "B1", "F2", "B2"]),
    ],
)
def test_a_pass_that_fails_ends_the_other(breaks: str, done: list[str]) -> None:
    turns = Turns(CPU)
    assert passes(turns, (4, 4), breaks) == [*done, f"raised {breaks}"]
    assert isinstance(turns.error, ValueError)
    assert passes(turns, (2, 2)) == ["F0", "B0", "F1", "B1"], "what has failed leaves nothing behind"


def test_alone_a_pass_waits_for_nobody() -> None:
    turns = Turns(CPU)
    turns.hand_over(0)
    passes(turns, (1, 1))
    turns.hand_over(1)


def test_the_time_of_a_pair_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(CPU), iter(range(10))
    monkeypatch.setattr(clock, "_now", lambda: next(times))
    for _ in range(2):
        with clock.during("busy"), clock.during("busy"):
            pass
    assert clock.read() == (2, 0)
