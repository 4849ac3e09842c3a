"""The table of random layouts in docs/parity.md: rows of layouts that are run again are replaced, the others stay."""

from pathlib import Path
from typing import Any

from tests.parity.compare import BOUNDS, Differences
from tests.parity.random_layouts import Drawn
from training.config import Config, leaves
from training.files import write_text

HEADING = "## The table"
TOLD = ("parallel.", "activations.", "model.moe.experts", "optimizer.kind")


def row(seed: int, drawn: Drawn, redrawn: int, found: Differences) -> dict[str, Any]:
    """As plain values: tests run in other processes than the one that writes the table."""
    default = leaves(Config())
    keys = {name: value for name, value in leaves(drawn.config).items() if name.startswith(TOLD)}
    changed = [f"{name.removeprefix('parallel.')}={value}" for name, value in keys.items() if value != default[name]]
    return {
        "seed": f"{seed}/{drawn.number}",
        "layout": f"{drawn.ranks} x {' '.join(changed)}".lower(),
        "redrawn": redrawn,
        "differences": [found.loss, found.norm, found.gradient, found.parameters],
    }


def update(page: Path, rows: list[dict[str, Any]]) -> None:
    """What stands on the page before the heading of the table is kept."""
    before, _, table = page.read_text().partition(HEADING)
    old = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    known = {cells[0]: cells for cells in old if "/" in cells[0]}
    for of in rows:
        numbers = [f"{number:.1e}" for number in of["differences"]]
        known[of["seed"]] = [of["seed"], f"`{of['layout']}`", str(of["redrawn"]), *numbers]
    lines = [known[seed] for seed in sorted(known, key=lambda seed: [int(part) for part in seed.split("/")])]
    redrawn = sum(int(cells[2]) > 0 for cells in lines)
    largest = [f"{max(float(cells[column]) for cells in lines):.1e}" for column in range(3, 7)]
    bound = BOUNDS["fp64"]
    title = [
        "seed",
        "ranks x layout",
        "redrawn",
        f"loss (≤ {bound.scalar:.0e})",
        f"norm (≤ {bound.scalar:.0e})",
        f"gradient (≤ {bound.gradient:.0e})",
        "weights (≤ 1)",
    ]
    said = f"{len(lines)} layouts, {redrawn} of them with weights that were drawn anew for a router's margin."
    largest_row = ["all", "the largest", str(redrawn), *largest]
    text = [HEADING, "", said, "", *map(_line, [title, ["---"] * len(title), largest_row, *lines])]
    write_text(page, before + "\n".join(text) + "\n")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
