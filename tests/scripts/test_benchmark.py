"""The plain loop trains the same model, its interval is right, and the script measures."""

import re
import subprocess
import sys

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from scripts.benchmark import median_interval, problems_of
from scripts.startup import ROOT, by_package
from training.config import Config, OptimizerKind


@pytest.mark.parametrize(("n", "first"), [(6, 1), (10, 2), (20, 6), (30, 10), (40, 14)])
def test_the_interval_is_that_of_the_tables(n: int, first: int) -> None:
    """Ranks of the 95 % interval of a median, from Conover, Practical Nonparametric Statistics (1999), table A3."""
    values = [float(value) for value in range(n, 0, -1)]
    assert median_interval(values) == (first, n + 1 - first)


def test_five_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="too few"):
        median_interval([1.0] * 5)


@pytest.mark.parametrize("tied_head", [True, False])
def test_the_plain_model_computes_what_ours_does(tied_head: bool) -> None:
    from scripts.plain_loop import GPT  # imports FSDP, which takes seconds

    config = ModelConfig(layers=2, dim=24, heads=3, context=10, vocab_size=67, vocab_multiple=32, tied_head=tied_head)
    torch.manual_seed(0)
    ours, plain = Decoder(config).double(), GPT(config).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)
    plain.load_state_dict(ours.state_dict(), strict=True)
    tokens, labels = torch.randint(67, (2, 3, 10))
    loss = ours(tokens=tokens, labels=labels)
    assert isinstance(loss, torch.Tensor)
    torch.testing.assert_close(plain(tokens, labels), loss[0] / labels.numel(), rtol=1e-12, atol=0)


def test_what_the_plain_loop_lacks_is_refused() -> None:
    config = Config(micro_batch="auto")
    config.optimizer.kind, config.model.dropout = OptimizerKind.sgd, 0.1
    assert [problem.key for problem in problems_of(config)] == ["optimizer", "model.dropout", "micro_batch"]
    assert problems_of(Config(micro_batch=2)) == []


def test_import_times_are_summed_by_package() -> None:
    profile = """import time: self [us] | cumulative | imported package
import time:       300 |        300 |     torch._C
a line of the run
import time:      1000 |       1300 |   torch
import time:       200 |        200 |   torch.nn.modules
import time:       500 |        700 |   torch.nn
import time:       900 |       2900 | numpy"""
    assert by_package(profile) == [
        ("torch", 0.001, 1),
        ("numpy", 0.0009, 1),
        ("torch.nn", pytest.approx(0.0007), 2),
        ("torch._C", 0.0003, 1),
    ]


def run(*words: str) -> str:
    command = [sys.executable, "-m", *words, "experiment=tiny", "precision=fp32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_measures_the_same_training() -> None:
    shown = run("scripts.benchmark", "--pairs", "7", "--warmup", "2", "metrics.every=1", "micro_batch=2")
    assert re.search(r"median \d+\.\d+ \(\d+\.\d+ to \d+\.\d+ with 95% confidence\), 7 pairs", shown)
    difference = re.search(r"largest relative difference (\S+) over 9 steps", shown)
    assert difference is not None, shown
    assert float(difference[1]) < 1e-5


@pytest.mark.slow
def test_start_up_ends_before_anything_is_saved() -> None:
    shown = run("scripts.startup", "--repeat", "1")
    assert re.search(r"command to first step: \d+\.\d s", shown)
    assert "torch.distributed.checkpoint" not in shown
    assert not re.search(r"^(sympy|torch\._dynamo) ", shown, re.MULTILINE)


@pytest.mark.slow
def test_the_stalls_of_saves_are_measured() -> None:
    words = ("model.layers=1", "model.dim=32", "model.heads=2", "model.vocab_multiple=1")
    shown = run("scripts.benchmark_saving", "--saves", "6", "--between", "3", *words)
    figures = re.findall(r"^(?:stall|bare).*?\(s\) +(\S+) +(\S+) to (\S+)$", shown, re.MULTILINE)
    assert len(figures) == 3 and all(float(low) <= float(middle) <= float(high) for middle, low, high in figures)
