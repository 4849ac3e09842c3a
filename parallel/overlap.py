"""DualPipeV with experts on other ranks: while rows of one micro-batch are under way between ranks, another micro-batch
computes (DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.2.1)."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Semaphore
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.moe import Dispatcher, MoE
from parallel.bubble import Clock
from parallel.expert import Exchange

FORWARD, BACKWARD = 0, 1


class Abandoned(Exception):
    """The pass it was taking turns with has failed."""


class Turns:
    """A forward and a backward pass of which one goes on until it hands over to the other. Nothing else decides who
    is next, so ranks that run the same two call collectives in the same order, whichever group they are on.

    The backward pass has a thread of its own; never do both run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread = ThreadPoolExecutor(1, "backward")
        self.turn = Semaphore(0), Semaphore(0)
        self.both = False  # whether both are under way
        self.error: BaseException | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Begins with the forward pass and returns when both have ended. Raises what the first to fail raised; the
        other ends where it hands over."""
        self.turn = Semaphore(1), Semaphore(0)
        self.both, self.error = True, None
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        ended = self.thread.submit(self._run, BACKWARD, backward, stream)
        self._run(FORWARD, forward, stream)
        wait([ended])
        if self.error is not None:
            raise self.error

    def _run(self, side: int, call: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        self.turn[side].acquire()
        try:
            if self.error is None:
                with torch.cuda.stream(stream):  # of a thread's own, as its device is
                    call()
        except BaseException as error:
            self.error = self.error or error
        self.both = False
        self.turn[1 - side].release()

    def hand_over(self, side: int) -> None:
        """Returns when it is this side's turn again; at once where the other has ended."""
        if self.both:
            self.turn[1 - side].release()
            self.turn[side].acquire()
        if self.error is not None:
            raise Abandoned from self.error


class OverlappedExchange(Exchange):
    """Hands over to the other micro-batch while rows are under way."""

    def __init__(self, group: dist.ProcessGroup, turns: Turns) -> None:
        super().__init__(group)
        self.turns = turns

    def _exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        found: Tensor = _Moved.apply(rows, received, sent, self)
        return found

    def move(self, side: int, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        rows = rows.contiguous()
        moved = rows.new_empty(sum(received), *rows.shape[1:])
        work: Any = dist.all_to_all_single(moved, rows, received, sent, group=self.group, async_op=True)
        self.turns.hand_over(side)
        work.wait()
        return moved


class _Moved(torch.autograd.Function):
    """An all-to-all of rows; backward sends the gradient of each to where the row came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], exchange: OverlappedExchange) -> Tensor:
        ctx.received, ctx.sent, ctx.exchange = received, sent, exchange
        return exchange.move(FORWARD, rows, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.move(BACKWARD, gradient, ctx.sent, ctx.received), None, None, None


def overlap_exchanges(stages: Iterable[nn.Module], device: torch.device) -> Turns | None:
    """Makes the exchanges of these stages hand over. None where no experts are on other ranks."""
    turns, found = Turns(device), False
    for layer in (module for stage in stages for module in stage.modules() if isinstance(module, MoE)):
        exchange: Dispatcher = layer.dispatcher
        if isinstance(exchange, Exchange):
            layer.dispatcher, found = OverlappedExchange(exchange.group, turns), True
    return turns if found else None


def pair_passes(schedule: Any, turns: Turns, clock: Clock) -> None:
    """Lets DualPipeV's pairs of a forward and a backward pass take turns. They run as they do in the schedule itself,
    but that both have received what they need before either begins.

    schedule: torch's. What this uses of it is private but for the registration; seen on torch 2.15, and of 2.11 the
    pairs alone."""
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    def run(pair: Any, context: Any) -> None:
        forward, backward = pair.sub_actions
        _receive(schedule, schedule.fwd_recv_ops, forward)
        _receive(schedule, schedule.bwd_recv_ops, backward)
        with clock.during("busy"):
            turns.run(partial(_forward, schedule, forward, context), partial(_backward, schedule, backward))

    schedule.register_custom_function(OVERLAP_F_B, run)


def _stage(schedule: Any, index: int) -> Any:
    """None where another rank has it."""
    return next((stage for stage in schedule._stages if stage.stage_index == index), None)


def _receive(schedule: Any, under_way: dict[tuple[int, int], list[dist.Work]], action: Any) -> None:
    schedule._assert_unsharded(_stage(schedule, action.stage_index))
    for work in under_way.pop((action.stage_index, action.microbatch_index), []):  # none from a stage of this rank
        work.wait()


def _forward(schedule: Any, action: Any, context: Any) -> None:
    stage, number = _stage(schedule, action.stage_index), action.microbatch_index
    output = stage.forward_one_chunk(
        number, context.arg_mbs[number], context.kwarg_mbs[number], save_forward_output=False
    )
    schedule._maybe_compute_loss(stage, output, context.target_mbs, number)
    after = _stage(schedule, action.stage_index + 1)
    if after is not None:
        after.set_local_fwd_input(output, number)


def _backward(schedule: Any, action: Any) -> None:
    stage, number = _stage(schedule, action.stage_index), action.microbatch_index
    loss = schedule._maybe_get_loss(stage, number)
    schedule.backward_counter[action.stage_index] += 1
    last = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=last)
    before = _stage(schedule, action.stage_index - 1)
    if before is not None:
        before.set_local_bwd_input(stage.get_local_bwd_output(number), number)
