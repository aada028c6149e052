"""Lets these tests use the end-to-end tests' small cluster, and prints what attacks have done."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from scene import TABLE


def pytest_terminal_summary(terminalreporter):
    if len(TABLE) > 2:
        terminalreporter.section("attacks")
        for row in TABLE:
            terminalreporter.write_line(row)
