"""Text from a run's checkpoint: by one process, by two that share its heads, and what is refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from models.attention import Attention
from models.config import ModelConfig
from models.roles import Role, Spec, specify
from parallel.config import ParallelConfig
from scripts.generate import generate, misfits, parse
from tests.ranks import run_ranks
from tests.runs.drive import train_py
from training.refusal import Refusal

WORDS = (
    "experiment=tiny model.layers=2 model.dim=32 model.heads=2 steps=3 batch_sequences=4 evals=none "
    "metrics.sample_tokens=0 metrics.tensorboard=false hardware.device=cpu compile=none name=written"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generate")
    (outcome,) = train_py([*WORDS.split(), f"out={out}"])
    assert outcome.code == 0, outcome
    return out / "written"


def texts(line: str) -> list[str]:
    return generate(parse(shlex.split(line)))


def written(line: str) -> Any:
    return texts(line)


def test_the_same_over_ranks(run: Path) -> None:
    line = f"{run} --prompt 'The sea' --prompt A --tokens 20 --temperature 0.9 --top-k 60"
    (alone,) = run_ranks(1, written, line)
    assert [text[:7] for text in alone] == ["The sea", alone[1][:7]] and len(alone[0]) > 7
    assert run_ranks(2, written, line) == [alone, alone]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--tokens 0 --top-p 2 --top-k 0 --temperature -1", "4 problems"),
        ("--tokens 128", "--tokens 127"),
        (f"--tokens 1 --prompt {'x' * 128}", "instead: a shorter --prompt"),
        ("--prompt \udcff", "is not UTF-8"),
        ("check_only=true", "instead: check_only=false"),
        ("model.dim=64", "was trained with 32"),
        ("model.dmi=64", "model.dim"),
    ],
)
def test_what_is_refused(run: Path, line: str, told: str) -> None:
    with pytest.raises(Refusal) as refusal:
        texts(f"{run} {line}")
    assert told in str(refusal.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="there is no such folder"):
        texts(f"{tmp_path / 'nothing'}")


def test_a_layout_without_a_cache_is_refused() -> None:
    found = misfits(ModelConfig(), ParallelConfig(cp=2, pp=2), 3, 5)
    assert [(problem.key, problem.instead) for problem in found] == [
        ("parallel.pp", "parallel.pp=1"),
        ("parallel.cp", "parallel.cp=1"),
    ]


class Mean(nn.Module):
    """The mean of what came before: attention without an AttentionCore."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.v = specify(nn.Linear(config.dim, config.dim, bias=False), weight=Spec(Role.matrix, 0.2))


class Derived(Attention):
    """Attention with a core."""


def test_attention_that_keeps_nothing_is_refused() -> None:
    """It would write each token without those before."""
    for kind, keys in [(Mean, ["model.parts.attention"]), (Derived, [])]:
        model = ModelConfig(parts={"attention": {"_target_": f"{__name__}.{kind.__name__}"}})
        assert [problem.key for problem in misfits(model, ParallelConfig(), 3, 5)] == keys


def test_nothing_is_compiled_for_one_token_after_the_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def load(checkpoint: str, words: list[str]) -> Any:
        given.extend(words)
        raise Refusal([])

    monkeypatch.setattr("training.loaded.load", load)
    for words, told in [("", ["compile=none"]), ("compile=block", ["compile=block"])]:
        given.clear()
        with pytest.raises(Refusal):
            texts(f"{run} {words}")
        assert given == told
