"""The script that a GPU is checked with, tried where there is none."""

import re
import subprocess
import sys

import pytest
import torch

from scripts import grouped_products
from scripts.startup import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpu_check", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", ["dense", "moe"])
def test_without_a_gpu_nothing_is_checked(what: str) -> None:
    done = run(what)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.mark.parametrize("dtype", grouped_products.BOUNDS, ids=str)
def test_grouped_products_are_held_to_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = grouped_products.Sizes(rows=100, dim=32, hidden=16, experts=4)
    right = grouped_products.compare(sizes, dtype, torch.device("cpu"))
    assert right.difference <= grouped_products.BOUNDS[dtype]
    assert right.grouped > 0 and right.looped > 0
    monkeypatch.setattr(grouped_products, "grouped_product", lambda rows, weights, counts: rows @ weights[1].T)
    assert grouped_products.compare(sizes, dtype, torch.device("cpu")).difference > 0.1


def test_an_expert_has_no_rows_and_others_have_all() -> None:
    sizes = grouped_products.Sizes(rows=100, dim=32, hidden=16, experts=4)
    counts = grouped_products.uneven(sizes, torch.Generator().manual_seed(1))
    assert counts[0] == 0 and counts.sum() == 100 and len(counts) == 4 and len(counts[1:].unique()) > 1


def test_kernels_of_a_cpu_are_the_formula() -> None:
    done = run("models", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout and "MIXED" not in done.stdout and "apart" in done.stdout
    for kernel in ("sdpa fp32", "math bf16", "flash fp32", "flash2: left out"):
        assert kernel in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_variant_trains_as_the_plain_model_does() -> None:
    done = run("--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERS" not in done.stdout
    assert "activations=offload" in done.stdout and "small compile=model" in done.stdout


@pytest.mark.slow
def test_experts_are_timed() -> None:
    done = run("moe", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "float32" in done.stdout and "DIFFERS" not in done.stdout
    assert re.search(r"small compile=block activations=full +[\d,]+ ", done.stdout)
