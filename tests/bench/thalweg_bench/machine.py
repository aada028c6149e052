"""Describes in machine.json where and when a suite was measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import thalweg


def describe(command: str) -> dict[str, object]:
    return {
        "date": now(),
        "cpu": _first_match(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "thalweg": thalweg.__version__,
        "commit": commit(Path(thalweg.__file__)),
        "command": command,
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def commit(file: Path) -> str | None:
    """Returns the commit of the repository that tracks `file`; "-dirty" when it has other
    changes.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        for argv in (
            ["ls-files", "--error-unmatch", file.name],
            ["describe", "--always", "--dirty", "--exclude=*"],
        ):
            result = subprocess.run([*git, *argv], capture_output=True, text=True, timeout=30)
            if result.returncode != 0:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip()


def _memory() -> str | None:
    kilobytes = _first_match(r"^MemTotal:\s*(\d+) kB", "/proc/meminfo")
    return None if kilobytes is None else f"{round(int(kilobytes) / (1 << 20))} GiB"


def _first_match(pattern: str, path: str) -> str | None:
    match = re.search(pattern, Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].strip() if match else None
