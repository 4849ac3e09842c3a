"""Shows the table of differences after the tests."""

import pytest
from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    from tests.parity.table import TABLE, lines  # here, so that a run without parity tests imports no torch

    if TABLE in config.stash:
        terminalreporter.section("parity of layouts")
        terminalreporter.write_line("\n".join(lines(config.stash[TABLE])))
