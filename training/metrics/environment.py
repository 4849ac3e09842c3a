"""On what a run was made: written to environment.json, to be read when its numbers are asked about."""

import os
import platform
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ["torch", "numpy", "hydra-core", "omegaconf", "tiktoken", "datasets", "tensorboard", "triton", "flash-attn"]


def environment() -> dict[str, Any]:
    """Versions, commit and hardware as this process sees them. No environment variables: they may hold secrets."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "espalier": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "git": git(ROOT),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(folder: Path) -> dict[str, Any] | None:
    """The commit and whether files differ from it; None outside a repository or without git."""
    if not (folder / ".git").exists():
        return None

    def answer(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    try:
        return {"commit": answer("rev-parse", "HEAD"), "dirty": answer("status", "--porcelain") != ""}
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
