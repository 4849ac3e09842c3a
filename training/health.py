"""Before the first step each rank multiplies matrices, writes and reads memory, and all of them sum: a host that is
slow, wrong or broken is named before the run waits for it."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist
from torch import Tensor

from training.devices import card_of
from training.ranks import Ranks

REPEATS = 5  # the shortest time counts: what else runs for a moment does not


class BadHost(Exception):
    """A rank's device computes wrongly or not at all. The message names its host."""


@dataclass(frozen=True)
class Sizes:
    """matrix: rows and columns. memory: float32 values that are written and read. reduced: those that are summed."""

    matrix: int
    memory: int
    reduced: int


# some 0.1 s on a GPU of today, and on a core
CUDA = Sizes(matrix=4096, memory=2**28, reduced=2**24)
CPU = Sizes(matrix=256, memory=2**20, reduced=2**14)


@dataclass(frozen=True)
class Report:
    """What one rank found. seconds: by what was measured; fault: "" where there is none."""

    host: str
    device: str
    seconds: dict[str, float]
    fault: str


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def matrix_product(device: torch.device, size: int) -> tuple[float, str]:
    """Seconds of a product, and what is wrong with it.

    Its factors are whole numbers of at most 3, so that it is exact in any order of summation and with TF32. It is
    checked in time size^2, by its product with a vector (Freivalds 1977)."""
    place = torch.arange(size, device=device)
    a = ((3 * place[:, None] + 5 * place) % 7 - 3).float()
    b = ((2 * place[:, None] + 3 * place) % 5 - 2).float()
    vector = (place % 11 - 5).double()
    seconds, product = shortest(device, lambda: multiply(a, b))
    right = torch.equal(product.double() @ vector, a.double() @ (b.double() @ vector))
    return seconds, "" if right else "a matrix product is wrong"


def copy(values: Tensor) -> Tensor:
    return values.clone()


def memory(device: torch.device, size: int) -> tuple[float, str]:
    """Seconds in which so many float32 values are read and written, and what is wrong with them."""
    values = torch.arange(size, device=device, dtype=torch.int32).view(torch.float32)
    seconds, copied = shortest(device, lambda: copy(values))
    right = torch.equal(copied.view(torch.int32), values.view(torch.int32))
    return seconds, "" if right else "memory does not hold what is written"


def all_reduce(device: torch.device, size: int, ranks: Ranks) -> tuple[float, str]:
    """Seconds of a sum over all ranks, and what is wrong with it. A collective."""
    values = torch.full((size,), float(ranks.rank + 1), device=device)

    def summed() -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    seconds, total = shortest(device, summed)
    expected = ranks.size * (ranks.size + 1) / 2
    return seconds, "" if bool((total == expected).all()) else "a sum over all ranks is wrong"


def shortest(device: torch.device, work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Of several times; the first, in which kernels are loaded and ranks connected, does not count."""
    result, seconds = work(), float("inf")
    for _ in range(REPEATS):
        began = finished(device)
        result = work()
        seconds = min(seconds, finished(device) - began)
    return seconds, result


def finished(device: torch.device) -> float:
    """The time when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_health(device: torch.device, ranks: Ranks, slow_factor: float) -> tuple[str, list[str]]:
    """What was measured, in a line, and a warning for each slow rank. A collective. Raises BadHost on all ranks."""
    began = time.perf_counter()
    sizes = CUDA if device.type == "cuda" else CPU
    alone: dict[str, Callable[[], tuple[float, str]]] = {
        "matrix product": lambda: matrix_product(device, sizes.matrix),
        "memory": lambda: memory(device, sizes.memory),
    }
    reports = ranks.gather(measured(device, alone))
    refuse_faults(reports)
    if ranks.size > 1:
        together = {"all-reduce": lambda: all_reduce(device, sizes.reduced, ranks)}
        sums = ranks.gather(measured(device, together))
        refuse_faults(sums)
        reports = [
            Report(one.host, one.device, one.seconds | summed.seconds, "")
            for one, summed in zip(reports, sums, strict=True)
        ]
    told = [
        f"{what} {1e3 * median_low(times):.2f} ms (at most {1e3 * max(times):.2f})"
        for what in reports[0].seconds
        if (times := [report.seconds[what] for report in reports])
    ]
    return f"health check: {', '.join(told)}; {time.perf_counter() - began:.1f} s in all", slow(reports, slow_factor)


def measured(device: torch.device, works: dict[str, Callable[[], tuple[float, str]]]) -> Report:
    """One after the other, up to a fault."""
    seconds: dict[str, float] = {}
    fault = ""
    for what, work in works.items():
        try:
            seconds[what], fault = work()
        except RuntimeError as error:  # as broken devices and links raise it
            fault = f"{what} failed: {error}"
        if fault:
            break
    return Report(socket.gethostname(), str(card_of(device).model), seconds, fault)


def refuse_faults(reports: Sequence[Report]) -> None:
    bad = [f"{named(rank, report)}: {report.fault}" for rank, report in enumerate(reports) if report.fault]
    if bad:
        raise BadHost("health check: " + "; ".join(bad))


def slow(reports: Sequence[Report], factor: float) -> list[str]:
    """A warning for each rank that takes more than `factor` times as long as most. All wait for each other in a sum, so
    its time names nobody."""
    warnings = []
    for what in ("matrix product", "memory"):
        usual = median_low([report.seconds[what] for report in reports])
        for rank, report in enumerate(reports):
            if (times := report.seconds[what] / usual) > factor:
                warnings.append(f"{named(rank, report)} is slow: its {what} takes {times:.1f} times as long as usual")
    return warnings


def named(rank: int, report: Report) -> str:
    return f"host {report.host}, rank {rank} ({report.device})"
