#!/usr/bin/env python3
"""Says which tests `make check` runs for changed files.

Usage: affected_tests.py programs|targets|python FILE… , relative to the repository.

programs: the CTest programs of the rooms that the files belong to: those of the nearest folder at
    or above a file that has any.
targets: what must be built for them, and for the Python tests if native code has changed.
python: the changed tests themselves; tests of the package that name a changed module or, where none
    does, its package; and one job through real servers if native code or the package has changed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
PACKAGE = PurePosixPath("client/python/thalweg")
TESTS = PurePosixPath("client/python/tests")
JOB = "tests/e2e/test_embedded.py"
INSTALLED = ("thalweg_torch", "thalweg_sidecar_bin", "thalweg_aggregator_bin")
_NATIVE = {".cc", ".h", ".cu", ".cuh", ".proto"}
_NATIVE_ROOMS = ("core", "kernels", "server", "client/core", "client/torch", "proto")


def programs(files: Iterable[str], folders: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the programs of the nearest folders that have any; `folders` has each folder's."""
    found: set[str] = set()
    for file in files:
        path = PurePosixPath(file)
        if path.suffix not in _NATIVE:
            continue
        nearest = next((f for f in map(str, path.parents) if f in folders), None)
        found.update(folders[nearest] if nearest else ())
    return sorted(found)


def changes_native(files: Iterable[str]) -> bool:
    """Returns whether the installed programs and modules change with the files."""
    return any(
        PurePosixPath(file).suffix in _NATIVE
        and not PurePosixPath(file).stem.endswith(("_test", "_bench"))
        and file.startswith(_NATIVE_ROOMS)
        for file in files
    )


def python_tests(files: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """Returns Python tests; `texts` has the sources of the package's, by name."""
    files = list(files)
    found = {f for f in files if PurePosixPath(f).match("test_*.py")}
    modules = [
        PurePosixPath(f).relative_to(PACKAGE).with_suffix("")
        for f in files
        if f.startswith(f"{PACKAGE}/") and f.endswith(".py")
    ]
    for module in modules:
        name = module.parent.name if module.name == "__init__" else module.name
        found.update(_naming(name, texts) or _naming(module.parent.name, texts))
    if modules or changes_native(files):
        found.add(JOB)
    return sorted(found)


def _naming(word: str, texts: Mapping[str, str]) -> set[str]:
    if not word:
        return set()
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    return {name for name, text in texts.items() if pattern.search(text)}


def _built() -> dict[str, list[str]]:
    """Returns the names of the test programs in the build, by their source folder."""
    shown = subprocess.run(
        ["ctest", "--test-dir", str(BUILD), "--show-only=json-v1"],
        check=True,
        capture_output=True,
        text=True,
    )
    folders: dict[str, list[str]] = {}
    for test in json.loads(shown.stdout)["tests"]:
        program = Path(test["command"][0])
        folders.setdefault(str(program.parent.relative_to(BUILD)), []).append(test["name"])
    return folders


def _texts() -> dict[str, str]:
    paths = (ROOT / TESTS).glob("test_*.py")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def main(what: str, files: list[str]) -> None:
    if what == "python":
        names = [name for name in python_tests(files, _texts()) if (ROOT / name).exists()]
    else:
        names = programs(files, _built())
        if what == "targets" and changes_native(files):
            names = [*names, *INSTALLED]
    print("".join(f"{name}\n" for name in names), end="")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
