"""Tests the pages' code, and what scripts/stage_docs.py makes the documentation site of."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import thalweg

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "deploy") for path in ROOT.glob(f"{folder}/**/*.md")),
]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def parse_shell(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)


PARSERS = {
    "python": lambda text: ast.parse(text.replace("…", "...")),  # … stands for the reader's own
    "sh": parse_shell,
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}


@pytest.fixture
def stage_docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("stage_docs")


def test_paths_that_pages_name_exist():
    """ADRs and measurements say what was there at their time.

    A name without an ending may stand for a header and its source.
    """
    path = re.compile(
        r"`((?:client|core|server|kernels|tests|scripts|helm|deploy|cmake|proto)/[\w./-]*\w)`"
    )
    named = {
        (page.relative_to(ROOT), name)
        for page in PAGES
        if not {"adr", "measurements"} & {*page.parts} and page.name != "CHANGELOG.md"
        for name in path.findall(page.read_text("utf-8"))
    }
    assert len(named) > 100
    missing = [
        (page, name)
        for page, name in named
        if not (ROOT / name).exists() and not [*ROOT.glob(f"{name}.*")]
    ]
    assert missing == []


def test_pages_give_constants_the_values_of_the_code():
    headers = "".join(
        path.read_text("utf-8")
        for room in ("core", "server")
        for path in ROOT.glob(f"{room}/**/*.h")
    )
    given = {
        found
        for page in PAGES
        for found in re.findall(r"`(k[A-Z]\w+)` \((\d+)\)", page.read_text())
    }
    assert given
    wrong = [
        (name, value)
        for name, value in given
        if not re.search(rf"\b{name} = (?:uint\d+_t\{{)?{value}\b", headers)
    ]
    assert wrong == []


def test_code_of_the_pages_is_code():
    wrong, checked = [], 0
    for page in PAGES:
        for indent, language, code in BLOCK.findall(page.read_text("utf-8")):
            if language in PARSERS:
                checked += 1
                try:
                    PARSERS[language](re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
                except (SyntaxError, ValueError, yaml.YAMLError) as error:
                    wrong.append(f"{page.relative_to(ROOT)}: {error}\n{code}")
    assert checked > 50
    assert not wrong, "\n".join(wrong)


def name_of(node):
    """Returns the dotted name that an expression is, or none."""
    text = ast.unparse(node)
    return text if re.fullmatch(r"[\w.]+", text) else ""


def calls(code):
    """Yields each call of a function or class of thalweg, with its whole name."""
    tree, imported = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = name_of(node.func).partition(".")
            name = imported.get(first, first) + dot + rest
            if name.startswith("thalweg."):
                yield name, node


def test_calls_of_the_pages_have_arguments_that_thalweg_takes():
    wrong, checked = [], set()
    for page in PAGES:
        for _, _, code in re.findall(BLOCK, page.read_text("utf-8")):
            try:
                found = list(calls(code.replace("…", "...")))
            except SyntaxError:
                continue  # another language, or a test above complains
            for name, call in found:
                checked.add(name)
                given = {k.arg: None for k in call.keywords if k.arg}
                try:
                    inspect.signature(resolve_name(name)).bind(*call.args, **given)
                except (AttributeError, ImportError, TypeError) as error:
                    wrong.append(f"{page.relative_to(ROOT)}: {ast.unparse(call)}: {error}")
    assert len(checked) > 10
    assert not wrong, "\n".join(wrong)


def test_reference_has_every_module_of_the_package_but_the_names_of_others(stage_docs):
    assert {f"thalweg.{name}" for name in thalweg._MODULES} - set(stage_docs.public_modules()) == {
        "thalweg.compat"
    }


def test_site_has_all_pages_and_what_they_link_to_and_lists_linked_folders(stage_docs, tmp_path):
    stage_docs.stage(tmp_path)
    assert {path.relative_to(ROOT) for path in PAGES} <= {
        path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")
    }
    assert (tmp_path / "proto/thalweg/v1/policy.proto").exists()  # docs/security.md links to it
    decisions = (tmp_path / "docs/adr/index.md").read_text("utf-8")
    fourth = "[4. Hold all contributions, then fold once in node order]"
    assert f"- {fourth}(0004-deterministic-sum-order.md)\n" in decisions
    worker = (tmp_path / "docs/cpp.md").read_text("utf-8")
    assert "[`client/core/session.h`](../cpp/client.md#client-core-session-h)" in worker
    assert "::: thalweg.ddp\n" in (tmp_path / "python.md").read_text("utf-8")
