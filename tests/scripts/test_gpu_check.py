"""The script that a GPU is checked with, tried where there is none."""

import subprocess
import sys

import pytest
import torch

from scripts.startup import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpu_check", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_checked() -> None:
    done = run()
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_variant_trains_as_the_plain_model_does() -> None:
    done = run("--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout
    assert "activations=offload" in done.stdout and "small compile=model" in done.stdout
