"""Shows the table of differences after the tests."""

import pytest
from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    entries = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "parity"
    ]
    if entries:
        from tests.parity.table import lines  # here, so that a run without parity tests imports no torch

        terminalreporter.section("parity of layouts")
        terminalreporter.write_line("\n".join(lines(entries)))
