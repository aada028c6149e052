#!/usr/bin/env python3
"""Checks that no given source file is longer than CONTRIBUTING.md allows.

Usage: check_sizes.py [--only] FILE… , relative to the repository. Files of other kinds are ignored.
Exits 1 after printing each file that is too long, and each exception that is no longer needed; with
--only, the files are not all that there are.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePath

_ROOT = Path(__file__).resolve().parent.parent
_HEADER, _SOURCE, _TEST, _PYTHON = 150, 400, 500, 300
_LIMITS = {
    ".h": _HEADER,
    ".cuh": _HEADER,
    ".cc": _SOURCE,
    ".cu": _SOURCE,
    ".py": _PYTHON,
    ".pyi": _PYTHON,
}

# Files that are still longer. Remove a line once its file is split; add none.
_EXCEPTIONS = {
    "client/core/sidecar_session.h",
    "client/python/thalweg/_C.pyi",
    "core/device/fake_runtime.h",
    "server/aggregator/job.h",
}


def limit_of(path: PurePath) -> int | None:
    """Returns how many lines a file may have, or None for files that have no limit."""
    limit = _LIMITS.get(path.suffix)
    if limit is None:
        return None
    is_test = path.stem.startswith("test_") or path.stem.endswith("_test")
    return _TEST if is_test else limit


def check_files(names: list[str], *, are_all: bool = True) -> list[str]:
    problems = []
    for name in names:
        limit = limit_of(PurePath(name))
        if limit is None:
            continue
        lines = len((_ROOT / name).read_text(encoding="utf-8").splitlines())
        if lines > limit and name not in _EXCEPTIONS:
            problems.append(f"{name}: {lines} lines, at most {limit} are allowed: split it")
        if lines <= limit and name in _EXCEPTIONS:
            problems.append(f"{name}: no longer too long: remove it from the exceptions")
    missing = sorted(_EXCEPTIONS - set(names)) if are_all else []
    return problems + [f"{name}: does not exist: remove it from the exceptions" for name in missing]


def main() -> int:
    names = sys.argv[1:]
    are_all = names[:1] != ["--only"]
    problems = check_files(names if are_all else names[1:], are_all=are_all)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
