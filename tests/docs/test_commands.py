"""Every command that README and docs show would start, or is refused where its block says so.

A command stands in a block fenced as `bash`, or as `bash refused` if it shows a mistake; or in an indented block."""

import json
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.huggingface import config_to_huggingface
from training.check import settle
from training.compose import check_command, compose
from training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)( refused)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    ((?:pip|uv|python|torchrun) .*)$", re.MULTILINE)
FILE = re.compile(r"In `(\S+)`:\n\n```(?:yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    refused: bool

    def __str__(self) -> str:
        return self.line


def commands(page: Path) -> list[Command]:
    text = page.read_text()
    blocks = [(block[4], bool(block[3])) for block in FENCED.finditer(text) if block[2] == "bash"]
    blocks.append(("\n".join(INDENTED.findall(FENCED.sub("", text))), False))
    lines = [(line.partition("  #")[0].strip(), refused) for block, refused in blocks for line in block.splitlines()]
    return [Command(page.name, line, refused) for line, refused in lines if line]


SHOWN = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
TRAINING = [command for command in SHOWN if " train.py" in command.line]
SCRIPTS = [command for command in SHOWN if " -m scripts." in command.line]
TOOLS = [command for command in SHOWN if command not in TRAINING and command not in SCRIPTS]


def test_the_pages_have_commands() -> None:
    assert {command.page for command in TRAINING} >= {"README.md", "getting-started.md", "data.md", "checkpoints.md"}
    assert sum(command.refused for command in TRAINING) >= 4
    assert [command.line for command in commands(ROOT / "README.md")][:2] == [
        "pip install uv && uv run train.py",
        "pip install uv && uv run pytest",
    ]


def test_no_command_stands_in_another_block() -> None:
    others = [
        block[4] for page in PAGES for block in FENCED.finditer(page.read_text()) if block[2] not in ("bash", "text")
    ]
    assert [block for block in others if re.search(r"^ *(pip|uv|python|torchrun) ", block, re.MULTILINE)] == []


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's folder, with the files that the commands name and the pages show."""
    for page in PAGES:
        for path, content in FILE.findall(page.read_text()):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
    for folder in ("SmolLM2-135M", "Llama-3.2-1B"):
        path = tmp_path / "models" / folder / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(config_to_huggingface(ModelConfig(vocab_size=50257))))
        path.with_name("tokenizer.json").touch()
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.check.input_problems", lambda config: [])  # the reader's texts and runs are not here


@pytest.mark.parametrize("command", TRAINING, ids=str)
@pytest.mark.usefixtures("readers_folder")
def test_train(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _, end = command.line.partition(" train.py")
    if ranks := re.search(r"torchrun .*--nproc-per-node (\d+)$", start):
        monkeypatch.setenv("WORLD_SIZE", ranks[1])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks[1])
    else:
        assert re.fullmatch(r"(pip install uv && )?(uv run|python)", start), start
    words = shlex.split(end)
    if command.refused:
        with pytest.raises(Refusal):
            settle(*compose(words))
    elif "-m" in words:
        check_command(words)  # composes and checks each job
    else:
        settle(*compose(words))


@pytest.mark.parametrize("command", SCRIPTS, ids=str)
def test_script(command: Command) -> None:
    module, _, end = command.line.partition(" -m ")[2].partition(" ")
    assert find_spec(module) is not None
    words = [word for word in shlex.split(end) if re.match(r"[\w.]+=", word)]
    settle(*compose(words)) if "--ranks" not in end else compose(words)


@pytest.mark.parametrize("command", TOOLS, ids=str)
def test_tool(command: Command) -> None:
    """Other commands are of these programs, and the paths they name are there."""
    run = command.line.removeprefix("pip install uv && ").removeprefix("pip install uv").strip()
    for part in filter(None, run.split(" && ")):
        program, *words = shlex.split(part.removeprefix("uv run ").removeprefix("uv "))
        assert program in ("pytest", "ruff", "mypy", "lint-imports", "tensorboard", "sync"), part
        for word in words:
            assert not word.startswith(("tests/", "docs/", "scripts/")) or (ROOT / word).exists(), word


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                known = ["#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in known, f"{page.name} links to {target}{anchor}"
