"""Every command that README and docs show: it is refused where the text says so, and would start elsewhere."""

import re
import shlex
from pathlib import Path

import pytest

from training.check import settle
from training.compose import compose
from training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("train.py", "scripts.")
REFUSED = {"steps=None", "optimizer.lrr=1e-3", "modle=gpt2_124m", "batch_sequences=30 micro_batch=4"}
OWN = {"--config-dir", "data=text", "tokenizer=huggingface"}  # need files of the reader's


def shown() -> list[str]:
    """The lines of the fenced blocks, by what follows `train.py`; other lines as they are."""
    lines = [
        line.strip() for page in PAGES for block in FENCED.findall(page.read_text()) for line in block.splitlines()
    ]
    return sorted({line.partition("  #")[0].strip() for line in lines if line and not line.startswith("#")})


TRAINING = [line for line in shown() if "train.py" in line]


def test_there_are_commands() -> None:
    assert len(TRAINING) > 20


@pytest.mark.parametrize("line", TRAINING)
def test_a_training_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _, after = line.partition("train.py")
    words = shlex.split(after)
    ranks = re.search(r"--nproc-per-node (\d+)", before)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks[1])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks[1])
    if {"--help", "--cfg"} & set(words):
        words = [word for word in words if word not in ("--help", "--cfg", "job")]
    if OWN & {word.partition(" ")[0] for word in words}:
        words = with_files(words, tmp_path)
        monkeypatch.chdir(tmp_path)
    if "-m" in words:
        words = ["-m", *[word for word in words if word != "-m"]]
    if after.strip() in REFUSED:
        with pytest.raises(Refusal):
            settle(*compose(words))
        return
    config, chosen = compose([word.partition(",")[0] if "lr=" in word else word for word in words if word != "-m"])
    settle(config, chosen)


def with_files(words: list[str], folder: Path) -> list[str]:
    """Puts what the command reads where it looks for it."""
    texts = folder / "my_texts"
    (texts / "more").mkdir(parents=True)
    for name in ("a.txt", "rows.parquet", "tokenizer.json", "more/b.jsonl.gz"):
        (texts / name).write_text("")
    experiments = folder / "my_configs" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "mine.yaml").write_text("# @package _global_\nsteps: 10\n")
    return [str(folder / word) if word == "my_configs" else word for word in words]


@pytest.mark.parametrize("line", [line for line in shown() if "-m scripts." in line])
def test_a_script_exists(line: str) -> None:
    module = re.search(r"-m (scripts\.\w+)", line)
    assert module is not None and (ROOT / (module[1].replace(".", "/") + ".py")).exists()


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
