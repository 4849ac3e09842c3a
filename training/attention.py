"""Which kernel of attention a run has, and whether it can do what the config asks."""

from collections.abc import Iterator

import torch

from models.backends import BACKENDS, absent, choose
from models.config import Attention
from parallel.config import Context, Dtype
from parallel.precision import computes_bf16
from training.check_attention import asked_by, device_rules
from training.config import Config
from training.refusal import Problem


def attention_of(config: Config, device: torch.device, dtype: Dtype) -> tuple[Attention, str]:
    """The kernel, and why it is this one. dtype: what the run computes in."""
    named = config.model.attention
    if named is not Attention.auto:
        return named, "model.attention"
    if config.parallel.cp > 1 and config.parallel.context is Context.ring:
        return Attention.sdpa, "parallel.context=ring has a kernel of its own"
    return choose(asked_by(config, dtype), device.type, _capability(device))


def machine_rules(config: Config, device: torch.device) -> Iterator[Problem]:
    """What only shows on the device itself: rules that depend on its type, how new it is, and what is installed."""
    kernel, dtype = config.model.attention, config.precision.dtype
    if dtype is Dtype.auto:
        dtype = Dtype.bf16 if computes_bf16(device) else Dtype.fp32
    found = list(device_rules(config, device.type, dtype))
    yield from found
    if kernel is Attention.auto or found:
        return
    if install := absent(kernel):
        module = BACKENDS[kernel].module
        yield Problem(
            "model.attention",
            kernel.name,
            f"needs {module}, which is not installed",
            f"{install}, or model.attention=auto",
        )
    majors, (major, minor) = BACKENDS[kernel].majors, _capability(device)
    if majors and major not in majors:
        reason = f"is for GPUs of compute capability {', '.join(map(str, majors))}, and this one has {major}.{minor}"
        yield Problem("model.attention", kernel.name, reason, "model.attention=auto")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
