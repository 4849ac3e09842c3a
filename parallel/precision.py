"""The dtype of the computation over float32 master weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.roles import FULL_PRECISION, parameter_roles
from parallel.config import Dtype, PrecisionConfig

_DTYPES = {Dtype.fp32: torch.float32, Dtype.tf32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp64: torch.float64}


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware; emulated it is about ten times slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # private, with no public counterpart; seen on torch 2.11 and 2.15
    return torch.cpu._is_amx_tile_supported()


def settle(precision: PrecisionConfig, device: torch.device, on_all: Callable[[bool], bool] = bool) -> Dtype:
    """The dtype that `auto` stands for on this device, and the matrix-product mode it asks for switched on. on_all:
    whether something holds on every rank; their devices may differ."""
    dtype = precision.dtype
    if dtype is Dtype.auto:
        dtype = Dtype.bf16 if on_all(computes_bf16(device)) else Dtype.fp32
    torch.set_float32_matmul_precision("high" if dtype is Dtype.tf32 else "highest")
    return dtype


def compute_dtype(dtype: Dtype) -> torch.dtype:
    return _DTYPES[dtype]


def master_dtype(dtype: Dtype) -> torch.dtype:
    return torch.float64 if dtype is Dtype.fp64 else torch.float32


def on_same_copies(blocks: Sequence[nn.Module], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs the blocks, for use in backward: on the parameters that the blocks have now. In forward they
    may be LowPrecision's copies, which it has taken back by then."""
    module = _Called(blocks, call)
    now: dict[str, Tensor] = dict(module.named_parameters())
    if all(isinstance(parameter, nn.Parameter) for parameter in now.values()):
        return call  # masters, or what FSDP2 puts in their place by itself

    def again(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, now, args, kwargs)

    return again


class _Called(nn.Module):
    """A call and the modules it runs, as one module."""

    def __init__(self, modules: Sequence[nn.Module], call: Callable[..., Any]) -> None:
        super().__init__()
        self.modules_run = nn.ModuleList(modules)
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class LowPrecision(nn.Module):
    """Runs a model on copies of its parameters in a lower dtype; gradients arrive at the masters in the masters' dtype.
    Routers stay in the masters' dtype. It computes what FSDP2's MixedPrecisionPolicy computes, so single, DDP and FSDP2
    agree."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.kept = {name for name, role in parameter_roles(model).items() if role in FULL_PRECISION}

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        masters = self.model.named_parameters()
        copies = {name: master.to(self.dtype) for name, master in masters if name not in self.kept}
        return torch.func.functional_call(self.model, copies, args, kwargs)
