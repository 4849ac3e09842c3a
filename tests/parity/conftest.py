"""Shows the table of differences after the tests, and writes that of random layouts."""

from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", type=Path, help="the page whose table has the random layouts' differences")


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    entries = recorded(terminalreporter, "parity")
    if entries:
        from tests.parity.table import lines  # here, so that a run without parity tests imports no torch

        terminalreporter.section("parity of layouts")
        terminalreporter.write_line("\n".join(lines(entries)))
    page, rows = config.getoption("parity_table", None), recorded(terminalreporter, "random layout")
    if page is not None and rows:
        from tests.parity.random_table import update

        update(page, rows)


def recorded(terminalreporter: TerminalReporter, name: str) -> list[Any]:
    """What tests recorded by this name."""
    return [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for of, value in report.user_properties
        if of == name
    ]
