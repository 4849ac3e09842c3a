"""Writes docs/configuration.md from the schemas: `python -m scripts.reference`. With --check it only compares."""

import sys
from pathlib import Path

from models.schema import Changes
from training.config import Config
from training.files import write_text
from training.keys import Key, keys, sections, show

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration reference

Written by `python -m scripts.reference` from the schemas in `training/config.py`, `models/config.py` and
`parallel/config.py`; change it there.

A run is a tree of keys. Give any of them on the command line as `key=value`, and the preset of a group as
`group=preset`:

    python train.py model=gpt2_124m optimizer.lr=6e-4 steps=2000

- `null` is the absence of a value. `None` is a text, and refused.
- A list is written `[a,b]`; a text with special characters in quotes: `name='"a=b"'`.
- Presets of your own are YAML files in a folder of yours: `--config-dir my_configs experiment=mine` reads
  `my_configs/experiment/mine.yaml`. `${oc.env:NAME}` in them is a variable of the environment, read as on the
  command line; the run saves this text and a salted digest, not the value.
- `python train.py --cfg job` prints the config of a command. `check_only=true` also fills in what follows from it,
  checks it and the files it names, and stops.
- `python train.py -m optimizer.lr=3e-4,6e-4` runs once for each value.
- Of `steps`, `tokens` and `epochs`, and of `batch_sequences` and `batch_tokens`, the one on the command line stands,
  whatever a preset says.

**Changes** says what a key changes: `math` the numbers of the run, `layout` where and how fast they are computed, `io`
what is read, written and shown. A resume lets `layout` and `io` differ; a different `math` is refused unless
`checkpoint.allow_changes` lists the key.
"""


def reference() -> str:
    """The page."""
    parts = [
        INTRODUCTION,
        "## Top level\n",
        (Config.__doc__ or "") + "\n",
        _table([k for k in keys().values() if "." not in k.name]),
    ]
    for name, schema in sections().items():
        own = [key for key in keys().values() if key.name.startswith(f"{name}.")]
        parts += [f"## {name}\n", (schema.__doc__ or "") + "\n", _presets(name), _table(own)]
    parts += [
        "## experiment\n",
        "A preset of the whole run: it chooses presets of other groups and sets any key.\n",
        _presets("experiment"),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _presets(group: str) -> str:
    """The files of a group, each with its first comment."""
    lines = []
    for file in sorted((ROOT / "configs" / group).glob("*.yaml")):
        comments = [
            line[2:] for line in file.read_text().splitlines() if line.startswith("# ") and "@package" not in line
        ]
        lines.append(f"- `{group}={file.stem}`: {comments[0] if comments else ''}")
    return "\n".join(lines) + "\n"


def _table(rows: list[Key]) -> str:
    lines = ["| key | value | default | changes | |", "|---|---|---|---|---|"]
    for key in rows:
        cells = [f"`{key.name}`", key.legal(), f"`{show(key.default)}`", Changes(key.changes).name, key.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    page = reference()
    if arguments == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text() == page
        print("up to date" if same else "docs/configuration.md is not up to date: run python -m scripts.reference")
        return 0 if same else 1
    write_text(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
