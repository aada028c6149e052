"""Tests that the tests which the documentation names exist, and that pytest can import all."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:[A-Z]\w+Test)(?:\.\w+)?|test_\w+)`")


def existing():
    """Returns the names of all tests, and of all suites of C++ tests."""
    found = set()
    rooms = [*ROOT.glob("[cks]*/**/*_test.cc"), *ROOT.glob("tests/**/*_test.cc")]
    for path in rooms:
        text = path.read_text("utf-8")
        for suite, name in re.findall(r"^\w*TEST\w*\((\w+),\s*(\w+)\)", text, re.MULTILINE):
            found |= {suite, f"{suite}.{name}"}
    for path in modules():
        found |= set(re.findall(r"^\s*def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
    return found


def modules():
    return [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("client/**/test_*.py")]


def limits(page):
    """Returns the rows of the page's tables whose last column says what tests them."""
    rows, has_tests = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            has_tests = False
        elif cells[-1] == "tested by":
            has_tests = True
        elif has_tests and set(line) - set("|-"):
            rows.append((cells[0], cells[-1]))
    return rows


def test_every_limit_names_its_test():
    rows = limits((ROOT / "docs/security.md").read_text("utf-8"))
    assert len(rows) > 30
    untested = [what for what, test in rows if not (NAMED.search(test) or test == "the same")]
    assert untested == []


@pytest.mark.parametrize("page", ["docs/faults.md", "docs/security.md"])
def test_tests_that_a_page_names_exist(page):
    named = set(NAMED.findall((ROOT / page).read_text("utf-8")))
    assert named
    assert named - existing() == set()


def test_each_module_of_tests_has_a_name_of_its_own():  # pytest imports them by it
    counted = Counter(path.name for path in modules())
    assert [name for name, times in counted.items() if times > 1] == []
