"""Tests which modules of thalweg.amp and of the module `apex` may import each other."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from amp_models import script_environment

import thalweg.amp

ROOT = Path(thalweg.amp.__file__).parent
MODULES = {
    ".".join(("thalweg.amp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def imported(path):
    """The modules of thalweg.amp that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (members & MODULES.keys()) or {node.module}
    return names & MODULES.keys()


def test_modules_import_each_other_in_one_direction():
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 20
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def test_first_generation_is_needed_by_public_names_alone():
    package = "thalweg.amp.first_generation"
    users = {
        name
        for name, path in MODULES.items()
        if not name.startswith(package) and any(n.startswith(package) for n in imported(path))
    }
    assert users == {"thalweg.amp", "thalweg.amp.fp16_utils"}


@pytest.mark.parametrize("script", ["import torch", "import torch, apex"])
def test_parts_of_apex_are_imported_when_a_script_asks_for_them(script):
    result = subprocess.run(
        [sys.executable, "-c", f"{script}\nimport sys; print('thalweg.amp' in sys.modules)"],
        env=script_environment() | {"THALWEG_COMPAT": "apex"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_apex_has_no_other_parts():
    script = """
import torch, apex
for name in ("contrib", "transformer"):
    try:
        __import__(f"apex.{name}")
    except ImportError as error:
        print(str(error).partition(":")[0])
print(hasattr(apex, "contrib"), apex.optimizers.FusedLAMB.__name__)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=script_environment() | {"THALWEG_COMPAT": "apex"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [
        f"thalweg.compat.apex does not provide apex.{name}" for name in ("contrib", "transformer")
    ]
    assert result.stdout.splitlines() == [*said, "False FusedLAMB"]
    assert result.stderr == ""
