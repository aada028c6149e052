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
        left["shared memory"] = abandoned(shared_memory() - shm)
        return not any(left.values())

    until("nothing is left behind", is_clean, 20, lambda: str(left), every=0.05)


def shared_memory() -> set[str]:
    """Returns the names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def abandoned(names: set[str]) -> list[str]:
    """Returns those of the names in /dev/shm that have no running process's number in them, and
    that no process maps.

    torch, OpenMP and multiprocessing make others, also in the tests that run beside this one.
    """
    names = {name for name in names if not any(map(is_running, re.findall(r"\d+", name)))}
    inodes = {}
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):  # removed since
            inodes[name] = str(Path("/dev/shm", name).stat().st_ino)
    mapped = mapped_inodes() if inodes else set()
    return [name for name, inode in inodes.items() if inode not in mapped]


def mapped_inodes() -> set[str]:
    """Returns the inodes of what processes map of /dev/shm. Its names there may be former ones."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended since
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
            found |= {line.split()[4] for line in lines if " /dev/shm/" in line}
    return found


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
