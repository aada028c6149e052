"""Finds programs of a build, and runs commands that must end in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from thalweg._job._processes import describe_exit, die_with_parent
from thalweg_bench.rows import BenchError

_GRACE_SECONDS = 30.0  # for a command to take its network down


def find_programs(folder: Path, pattern: str) -> list[Path]:
    """Returns executables of such a name below `folder`, by name."""
    found = [p for p in folder.rglob(pattern) if p.is_file() and os.access(p, os.X_OK)]
    return sorted(found, key=lambda path: path.name)


def run_watched(
    argv: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    quiet: bool = False,
) -> None:
    """Raises BenchError unless the command succeeds in time. Leaves nothing running.

    `env` is added to the environment. `output` gets what the command prints, and with `quiet` also
    its errors; default: it is shown.
    """
    preexec = die_with_parent(signal.SIGTERM)
    told: list[int] = []
    # While the command starts, an exception would leave it running.
    old = signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))
    try:
        with subprocess.Popen(
            argv,
            env=os.environ | dict(env or {}),
            stdout=output,
            stderr=output if quiet else None,
            preexec_fn=preexec,
        ) as process:
            try:
                signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
                if told:
                    sys.exit(128 + told[0])
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise BenchError(f"it did not end within {seconds:.0f} s") from None
            finally:
                process.terminate()
                try:
                    process.wait(_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
    finally:
        signal.signal(signal.SIGTERM, old)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code != 0:
        raise BenchError(f"it {describe_exit(code)}; its message is above")
