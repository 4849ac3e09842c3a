"""What each kernel of attention can do. No torch here: a config that asks for more is refused before it starts."""

from dataclasses import dataclass
from importlib.util import find_spec

from models.config import Attention

NOWHERE: tuple[str, ...] = ()
CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")


# Take values that are narrower than keys; the others get zeros behind them (models.kernels.widened) and give as many
# back.
OF_ANY_WIDTH = (Attention.auto, Attention.sdpa, Attention.math, Attention.flex)


@dataclass(frozen=True)
class Backend:
    """Types of devices on which it trains, and on which it can do each thing. Grouped heads all can."""

    runs: tuple[str, ...]
    documents: tuple[str, ...]
    window: tuple[str, ...]
    softcap: tuple[str, ...]
    dropout: tuple[str, ...]
    fp32: tuple[str, ...]
    fp64: tuple[str, ...]
    majors: tuple[int, ...] = ()
    """Of the compute capabilities of GPUs that have it; empty: all."""
    module: str | None = None
    """What must be installed."""
    install: str = ""
    widest: int | None = None
    """Numbers of a head that it can do on a GPU; None: any."""


WIDEST = 256  # of FlashAttention 2, 3 and 4, which flash and varlen are too, and of cuDNN's
FLASH3 = "FlashAttention 3: `python setup.py install` in the folder hopper of github.com/Dao-AILab/flash-attention"
AMPERE = (8, 9, 10, 11, 12)
BACKENDS = {
    #                             runs  documents window softcap  dropout fp32    fp64
    Attention.sdpa: Backend(BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH),
    Attention.math: Backend(BOTH, BOTH, BOTH, NOWHERE, BOTH, BOTH, BOTH),
    Attention.flash: Backend(BOTH, CPU, CPU, NOWHERE, CUDA, CPU, CPU, widest=WIDEST),
    Attention.efficient: Backend(CUDA, CUDA, CUDA, NOWHERE, CUDA, CUDA, NOWHERE),
    Attention.cudnn: Backend(CUDA, CUDA, CUDA, NOWHERE, CUDA, NOWHERE, NOWHERE, widest=WIDEST),
    Attention.flash2: Backend(
        CUDA, CUDA, CUDA, CUDA, CUDA, NOWHERE, NOWHERE, AMPERE, "flash_attn", "`uv sync --extra flash-attn`", WIDEST
    ),
    Attention.flash3: Backend(
        CUDA, CUDA, CUDA, NOWHERE, NOWHERE, NOWHERE, NOWHERE, (9,), "flash_attn_interface", FLASH3, WIDEST
    ),
    Attention.flash4: Backend(
        CUDA,
        CUDA,
        NOWHERE,
        NOWHERE,
        NOWHERE,
        NOWHERE,
        NOWHERE,
        (9, 10),
        "flash_attn.cute.interface",
        "`uv pip install flash-attn-4`",
        WIDEST,
    ),
    Attention.flex: Backend(CUDA, CUDA, CUDA, CUDA, NOWHERE, CUDA, NOWHERE),
    Attention.xformers: Backend(
        CUDA, NOWHERE, CUDA, NOWHERE, CUDA, CUDA, NOWHERE, (), "xformers", "`uv sync --extra xformers`"
    ),
    Attention.varlen: Backend(CUDA, CUDA, CUDA, NOWHERE, NOWHERE, NOWHERE, NOWHERE, AMPERE, widest=WIDEST),
}


@dataclass(frozen=True)
class Asked:
    """What a config asks of attention. dtype: fp32, fp64 or another, which all have; width: of a head."""

    documents: bool
    window: bool
    softcap: bool
    dropout: bool
    dtype: str
    width: int = 64


def lacks(kernel: Attention, asked: Asked, device: str) -> str | None:
    """Why the kernel cannot do it on a type of device; None where it can."""
    backend, on = BACKENDS[kernel], "a CPU" if device == "cpu" else "a GPU"
    if device not in backend.runs:
        return f"does not train on {on}"
    wanted = {
        "keeps no documents apart (data.mask_documents)": asked.documents and device not in backend.documents,
        "has no window (model.window)": asked.window and device not in backend.window,
        "bends no scores (model.attention_softcap)": asked.softcap and device not in backend.softcap,
        "drops nothing (model.dropout)": asked.dropout and device not in backend.dropout,
        "does not compute in float32": asked.dtype in ("fp32", "tf32") and device not in backend.fp32,
        "does not compute in float64": asked.dtype == "fp64" and device not in backend.fp64,
        f"has no heads wider than {backend.widest} (model.head_dim)": device == "cuda"
        and backend.widest is not None
        and asked.width > backend.widest,
        "drops nothing where it bends scores (model.dropout)": kernel is Attention.flash2
        and asked.softcap
        and asked.dropout,
    }
    missing = [what for what, lacking in wanted.items() if lacking]
    return f"{missing[0]} on {on}" if missing else None


def absent(kernel: Attention) -> str | None:
    """What to install, where it is not."""
    backend = BACKENDS[kernel]
    if backend.module is None:
        return None
    try:
        return None if find_spec(backend.module) is not None else backend.install
    except ModuleNotFoundError:  # of the package it is in
        return backend.install


def choose(asked: Asked, device: str, capability: tuple[int, int]) -> tuple[Attention, str]:
    """What `auto` stands for, and why: FlashAttention 3 on Hopper, 2 on Ampere and newer, else what torch chooses.
    capability: of the GPU."""
    if device != "cuda":
        return Attention.sdpa, f"the device is {device}"
    candidates = [Attention.flash3] if capability[0] == 9 else []
    candidates += [Attention.flash2] if capability[0] >= 8 else []
    passed_over: list[str] = []
    for kernel in candidates:
        reason = lacks(kernel, asked, device) or ("is not installed" if absent(kernel) else None)
        if reason is None:
            told = f"compute capability {capability[0]}.{capability[1]}"
            return kernel, "; ".join([told, *passed_over])
        passed_over.append(f"{kernel.name} {reason}")
    return Attention.sdpa, "; ".join(passed_over) or f"compute capability {capability[0]}.{capability[1]}"
