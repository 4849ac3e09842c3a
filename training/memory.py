"""Memory: what is used, how large a micro-batch fits, and what to say when it did not."""

import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from parallel.config import Dtype, Recompute
from parallel.local import local
from parallel.planning.stages import SPLIT, stages_per_rank
from parallel.recomputation import settled
from training.config import Config
from training.ranks import Ranks
from training.step import Step

USABLE_SHARE = 0.9  # of the memory that is free; the rest is fragmentation and what a probe does not see
_STATUS = Path("/proc/self/status")


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def used_bytes(device: torch.device) -> int:
    """Highest use so far: of the device's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak_of(action: Callable[[], None], device: torch.device) -> int:
    """Highest use while the action runs, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return torch.cuda.max_memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    action()
    return _status_bytes("VmHWM")


def limit_bytes(device: torch.device, ranks_per_host: int) -> int:
    """What this rank may use in all."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(USABLE_SHARE * (free + torch.cuda.memory_reserved(device)))
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(USABLE_SHARE * int(available.split()[1]) * 1024 / ranks_per_host) + _status_bytes("VmRSS")


def largest_micro_batch(
    probe: Callable[[int], None], sequences: int, device: torch.device, ranks_per_host: int, ranks: Ranks
) -> int:
    """The largest divisor of `sequences` (of one rank and step) whose forward and backward fit, the same on every rank.

    probe(n) runs n sequences forward and backward, a collective. Memory grows linearly in n, so two small probes tell
    the line.
    """
    divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
    if len(divisors) == 1:
        return 1
    probe(1)  # what is allocated once, by the first use
    first, second = divisors[0], divisors[1]
    low, high = _peak_of(lambda: probe(first), device), _peak_of(lambda: probe(second), device)
    slope = max(high - low, 1) / (second - first)
    limit = limit_bytes(device, ranks_per_host)
    fitting = [n for n in divisors if low + slope * (n - first) <= limit]
    return min(ranks.gather(max(fitting, default=1)))


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's own error, or the CPU allocator's, which is a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def _gib(tensors: Iterable[Tensor | None]) -> float:
    return sum(local(t).numel() * t.element_size() for t in tensors if t is not None) / 2**30


class OutOfMemory(Exception):
    """Memory ran out in a step; the message is `out_of_memory_report`."""


def out_of_memory_report(config: Config, rank: int, step: Step, device: torch.device) -> str:
    """Which rank, in which phase, what holds the memory, and three keys whose change frees the most."""
    weights = _gib(step.parameters)
    gradients = _gib(parameter.grad for parameter in step.parameters)
    moments = _gib(step.optimizer.tensors().values())
    used = used_bytes(device) / 2**30
    rest = max(used - weights - gradients - moments, 0.0)
    lines = [
        f"out of memory on rank {rank} ({os.uname().nodename}) in {step.progress.phase}.",
        f"  at the peak {used:.2f} GiB: weights {weights:.2f}, gradients {gradients:.2f}, optimizer {moments:.2f}, "
        f"activations and buffers {rest:.2f}",
        "  instead, one of:",
        *(f"    {way}" for way in _ways_to_fit(config, weights + gradients + moments, rest, device)[:3]),
    ]
    return "\n".join(lines)


def _ways_to_fit(config: Config, state: float, activations: float, device: torch.device) -> list[str]:
    """Keys whose change frees memory, with about how many GiB, those that leave the run as it is first."""
    ways = []
    micro, parallel = config.micro_batch, config.parallel
    if isinstance(micro, int) and micro > 1:
        smaller = max(n for n in range(1, micro) if micro % n == 0)
        ways.append(f"micro_batch={smaller}: {activations * (1 - smaller / micro):.2f} GiB less of activations")
    split = parallel.pp > 1 and parallel.schedule in SPLIT  # whose parameters stay whole, and nothing is computed again
    if settled(config.activations, config.model) in (Recompute.none, Recompute.selective) and not split:
        ways.append(f"activations=full: up to {activations * 7 / 8:.2f} GiB less of activations, a slower step")
    if parallel.shards == 1:
        ways.append(f"parallel=fsdp2 on 2 ranks or more: {state / 2:.2f} GiB less of state on 2")
    elif parallel.reshard_after_forward is False and not split:
        ways.append("parallel.reshard_after_forward=true: parameters are whole one block at a time")
    if parallel.shards > 1 and not parallel.cpu_offload and device.type == "cuda":
        ways.append(f"parallel.cpu_offload=true: {state:.2f} GiB of state wait in the CPU's memory")
    if config.precision.dtype in (Dtype.fp32, Dtype.tf32):
        ways.append(f"precision=bf16: {activations / 2:.2f} GiB less of activations (changes the run)")
    assert config.sequence_length is not None
    half = max(config.sequence_length // 2, 1)
    ways.append(f"sequence_length={half}: {activations / 2:.2f} GiB less of activations (changes the run)")
    fewer = max(config.model.layers // 2, parallel.pp * stages_per_rank(parallel), 1)
    if fewer < config.model.layers and parallel.stage_layers is None:
        share = f"{fewer / config.model.layers:.0%}".replace("%", " %")
        ways.append(f"model.layers={fewer}: about {share} of everything (changes the run)")
    return ways
