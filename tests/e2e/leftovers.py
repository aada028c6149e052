"""Finds what a test's programs have left behind."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from waiting import until


def await_clean(folder: Path, shm: set[str]) -> None:
    """Fails unless soon no program mentions `folder`, it is empty and /dev/shm is as before."""
    left: dict[str, Any] = {}

    def is_clean() -> bool:
        left["processes"] = processes_below(folder)
        left["files"] = [str(path) for path in folder.iterdir()]
        left["shared memory"] = sorted(shared_memory() - shm)
        return not any(left.values())

    until("nothing is left behind", is_clean, 20, lambda: str(left), every=0.05)


def shared_memory() -> set[str]:
    """Returns the names in /dev/shm but for those that have a running process's number in them.

    torch and OpenMP make such names, also in the tests that run beside this one.
    """
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not any(map(is_running, re.findall(r"\d+", name)))}


def is_running(pid: str) -> bool:
    return Path("/proc", pid).exists()


def processes_below(folder: Path) -> dict[int, str]:
    """Returns programs, not zombies, with `folder` in their arguments, as their TMPDIR or open."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes()
            if arguments and (
                str(folder).encode() in arguments + variables or str(folder) in open_paths(entry)
            ):
                found[int(entry.name)] = arguments.replace(b"\0", b" ").decode()
    return found


def open_paths(process: Path) -> set[str]:
    paths = set()
    for file in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            paths.add(str(file.readlink()))
    return paths
