"""Tests when a process counts as one that ends because something has failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import weakref
from thalweg._job import _failing

class Owner: pass

owner = Owner()
_failing.note_failures()
weakref.finalize(owner, lambda: print("fails" if _failing.is_failing() else "ends"))
"""


def said(rest: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", PROGRAM + rest]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, input="", check=False
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("", "ends"),
        ("sys.exit(0)", "ends"),
        ("raise ValueError", "fails"),
        ("raise KeyboardInterrupt", "fails"),
        ("import IPython\nraise ValueError", "fails"),  # as libraries do
        ("try:\n    raise ValueError\nexcept ValueError:\n    pass", "ends"),
        ("try:\n    raise ValueError\nexcept ValueError:\n    del owner", "fails"),
        ("try:\n    raise ValueError\nfinally:\n    del owner", "fails"),
    ],
)
def test_exception_that_is_on_its_way_or_has_ended_the_program_is_a_failure(rest, expected):
    assert said(rest) == expected


def test_error_of_an_interactive_session_ends_nothing():
    assert said("raise ValueError", "-i") == "ends"


def test_error_of_a_notebooks_cell_ends_nothing():
    cells = "from IPython.core.interactiveshell import InteractiveShell as Shell\n"
    cells += "sys.last_value = Shell.instance().run_cell('1 / 0').error_in_exec\n"
    assert said(cells).endswith("ends")
