"""Text from a run's checkpoint: by one process, by two that share its heads, and what is refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts.generate import generate, parse
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
