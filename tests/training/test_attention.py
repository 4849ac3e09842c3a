"""What kernels of attention ask of the machine itself."""

import pytest
import torch

from models.config import Attention
from training import attention
from training.config import Config


def test_what_only_the_device_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a config that does not name it."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(attention, "computes_bf16", lambda device: True)
    monkeypatch.setattr(attention, "absent", lambda kernel: "`uv sync --extra flash-attn`")

    def told(device: torch.device, capability: tuple[int, int], kernel: str) -> list[str]:
        monkeypatch.setattr(attention, "_capability", lambda device: capability)
        config = Config()
        config.model.attention = Attention[kernel]
        found = attention.machine_rules(config, device)
        return [f"{problem.reason}: {problem.instead}" for problem in found]

    (reason,) = told(gpu, (8, 0), "flash2")
    assert "flash_attn, which is not installed" in reason and "uv sync --extra flash-attn" in reason
    monkeypatch.setattr(attention, "absent", lambda kernel: None)
    assert told(gpu, (8, 0), "flash2") == told(gpu, (9, 0), "flash3") == told(gpu, (7, 5), "auto") == []
    for kernel, capability in (("flash2", (7, 5)), ("flash3", (8, 0)), ("flash3", (10, 0)), ("flash4", (8, 9))):
        (reason,) = told(gpu, capability, kernel)
        assert f"this one has {capability[0]}.{capability[1]}" in reason
    assert "does not train on a CPU" in told(torch.device("cpu"), (0, 0), "varlen")[0]
