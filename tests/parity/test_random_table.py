"""The page of random layouts keeps its text, and the rows that were not run again."""

from dataclasses import replace
from pathlib import Path
from random import Random

from tests.parity.compare import Differences
from tests.parity.random_layouts import legal
from tests.parity.random_table import row, update

NONE = Differences(True, True, True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_rows_that_are_run_again_are_replaced(tmp_path: Path) -> None:
    page, drawn = tmp_path / "page.md", {number: legal(Random(number), number) for number in (2, 3, 11)}
    page.write_text("# Parity\n\n| 1/1 | no row of the table |\n\n## The table\n")
    update(page, [row(1, drawn[11], 0, replace(NONE, norm=2e-13)), row(1, drawn[2], 0, replace(NONE, loss=1e-3))])
    update(page, [row(1, drawn[3], 2, replace(NONE, gradient=4e-12)), row(1, drawn[2], 0, replace(NONE, loss=3e-15))])
    before, _, table = page.read_text().partition("## The table\n")
    assert before == "# Parity\n\n| 1/1 | no row of the table |\n\n"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    assert [cells[0] for cells in lines] == ["seed", "---", "all", "1/2", "1/3", "1/11"]
    assert lines[2][2:] == ["1", "3.0e-15", "2.0e-13", "4.0e-12", "0.0e+00"]
    assert lines[3][3:] == ["3.0e-15", "0.0e+00", "0.0e+00", "0.0e+00"]
    assert lines[4][2:] == ["2", "0.0e+00", "0.0e+00", "4.0e-12", "0.0e+00"]
    assert lines[3][1].startswith(f"`{drawn[2].ranks} x ")
    assert "3 layouts, 1 of them with weights that were drawn anew" in table
