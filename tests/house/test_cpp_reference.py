"""Compares the reference of C++ with what Clang finds in the headers that the package installs."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = (ROOT / "cmake" / "public_headers.txt").read_text("utf-8").split()
ENTRIES = {
    "CXXConstructorDecl",
    "CXXConversionDecl",
    "CXXDestructorDecl",
    "CXXMethodDecl",
    "EnumDecl",
    "FieldDecl",
    "FunctionDecl",
    "FunctionTemplateDecl",
    "TypeAliasDecl",
    "VarDecl",
}


def entries_of(node, scope=""):
    """Yields the name of a declaration, and those of its members, that users may use."""
    name = scope + node.get("name", "")
    if node["kind"] in ENTRIES and not node.get("isImplicit"):
        yield name
    if node["kind"] == "CXXRecordDecl" and node.get("completeDefinition"):
        yield name
        access = "private" if node["tagUsed"] == "class" else "public"
        for member in node["inner"]:
            if member["kind"] == "AccessSpecDecl":
                access = member["access"]
            elif access == "public":
                yield from entries_of(member, f"{name}::")


def declared(source):
    """Returns how often Clang finds each name in the namespace of a source's headers."""
    dumped = subprocess.run(
        [
            *("clang-14", "-std=c++20", "-x", "c++", "-fsyntax-only", "-I", ROOT, "-"),
            *("-Xclang", "-ast-dump=json", "-Xclang", "-ast-dump-filter=thalweg::"),
        ],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    decoder, at, found = json.JSONDecoder(), dumped.find("{"), Counter()
    while at >= 0:
        node, end = decoder.raw_decode(dumped, at)
        found.update(entries_of(node))
        at = dumped.find("{", end)
    return found


def shown(page):
    """Returns how often a page of the reference declares each name."""
    found, scope = Counter(), ""
    for line in page.splitlines():
        if line.startswith("### "):
            scope = ""
            heading = re.sub(r"\\", "", unescape(line.split()[1])).removesuffix(",")
        for code in re.findall(r'<code class="cpp">(.*?)</code>', line):
            if name := re.search(r"<b>(.*?)</b>", code):
                plain = unescape(name[1]).replace("\\", "")
                if re.match(r"(class|struct) <b>", code):
                    found[heading] += 1
                    scope = f"{heading}::"
                else:
                    found[scope + plain] += 1
    return found


@pytest.fixture
def pages(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    importlib.import_module("cpp_reference").write(tmp_path)
    return [path.read_text("utf-8") for path in tmp_path.glob("cpp/*.md")]


def test_reference_declares_what_users_of_the_headers_see_and_nothing_else(pages):
    seen = declared("".join(f'#include "{header}"\n' for header in HEADERS))
    assert {"Session::Submit", "SessionOptions::rank", "TraceWriter", "DType"} <= set(seen)
    found = sum(map(shown, pages), Counter())
    assert not seen - found, "these have no entry in the reference"
    assert not found - seen, "these are in the reference, but users do not see them"


def test_headers_of_the_package_are_those_that_a_session_includes():
    todo, included = ["client/core/session.h"], set()
    while todo:
        header = todo.pop()
        included.add(header)
        text = (ROOT / header).read_text("utf-8")
        todo += set(re.findall(r'^#include "((?:client|core)/.*)"$', text, re.MULTILINE)) - included
    assert set(HEADERS) == included


def test_comments_are_shown_with_what_they_are_about(pages):
    text = "\n".join(pages)
    # Before a function, at the end of a line with more room before it, and going on below.
    assert (
        "Announces a bucket; when its layout has changed, again with the next generation." in text
    )
    assert re.search(r"<b>rank</b> = 0</code> \| this worker's rank in the job \|", text)
    assert "advances the moments, and gets two sums by granule, the squares of the weights" in text
    # A line of two functions, a link to another page, and one to a page of the documentation.
    assert "### Session::ReadWeights, Session::WriteWeights {" in text
    assert "[BucketLayout](base.md#BucketLayout)" in text
    assert "[docs/codecs.md](../docs/codecs.md)" in text
