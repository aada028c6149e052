"""The checks of scripts/ that `make lint` runs on the repository."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script, folder, *names):
    """Runs a copy of `script` in a repository at `folder`; returns exit status and messages."""
    copy = folder / "scripts" / script
    copy.parent.mkdir(exist_ok=True)
    copy.write_text((SCRIPTS / script).read_text("utf-8"), "utf-8")
    command = [sys.executable, copy, *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stderr.splitlines()


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


PAGE = """# One page

## The part with `code`
## Twice
## Twice
"""


@pytest.mark.parametrize(
    "target",
    ["b.md", "b.md#one-page", "b.md#the-part-with-code", "b.md#twice-1", "https://no.where/"],
)
def test_links_that_resolve_are_accepted(tmp_path, target):
    write(tmp_path, "pages/b.md", PAGE)
    write(tmp_path, "pages/a.md", f"[x]({target})\n```sh\n[y](not/a/link)\n```\n`[z](nor-this)`\n")
    assert run("check_links.py", tmp_path, "pages/a.md") == (0, [])


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("c.md", "'c.md' does not exist"),
        ("b.md#other", "'b.md#other': b.md has no such heading"),
        ("b.md#twice-2", "'b.md#twice-2': b.md has no such heading"),
        ("#other", "'#other': a.md has no such heading"),
    ],
)
def test_broken_links_are_named_with_their_line(tmp_path, target, problem):
    write(tmp_path, "pages/b.md", PAGE)
    write(tmp_path, "pages/a.md", f"# A\n\n[x]({target})\n")
    assert run("check_links.py", tmp_path, "pages/a.md") == (1, [f"pages/a.md:3: {problem}"])


def test_source_that_mentions_a_missing_page_is_named(tmp_path):
    # this file must not itself mention the page
    there, missing = (f"docs/{name}.md" for name in ("there", "missing"))
    write(tmp_path, there, PAGE)
    write(tmp_path, "a.py", f"# {there} has it\n# {missing} has not\n")
    expected = [f"a.py:2: '{missing}' does not exist"]
    assert run("check_links.py", tmp_path, "a.py") == (1, expected)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("x.h", 150), ("x.cc", 400), ("x_test.cc", 500), ("x.py", 300), ("test_x.py", 500)],
)
def test_file_may_have_as_many_lines_as_its_kind(tmp_path, name, limit):
    long = tmp_path / "long"
    write(tmp_path, name, "\n" * limit)
    write(long, name, "\n" * (limit + 1))
    allowed = run("check_sizes.py", tmp_path, name)[1]
    refused = run("check_sizes.py", long, name)[1]
    assert not any(message.startswith(f"{name}:") for message in allowed)
    assert f"{name}: {limit + 1} lines, at most {limit} are allowed: split it" in refused


def test_exceptions_are_accepted_only_while_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    check_sizes = importlib.import_module("check_sizes")
    monkeypatch.setattr(check_sizes, "_ROOT", tmp_path)
    monkeypatch.setattr(check_sizes, "_EXCEPTIONS", {"long.h", "short.h", "gone.h"})
    write(tmp_path, "long.h", "\n" * 151)
    write(tmp_path, "short.h", "\n" * 150)
    assert check_sizes.check_files(["long.h", "short.h"]) == [
        "short.h: no longer too long: remove it from the exceptions",
        "gone.h: does not exist: remove it from the exceptions",
    ]
