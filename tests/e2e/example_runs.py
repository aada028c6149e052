"""Runs an example on two nodes of this machine, as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import DEADLINE, environment, servers


def run_example(name: str, arguments: list[str], out: Path) -> str:
    """Lets the example write to `out`; returns what it has printed."""
    command = [sys.executable, "-m", "thalweg", "run", "--nodes", "2"]
    command += ["-m", f"thalweg.examples.{name}", *arguments, "--out", str(out)]
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(out)}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=3 * DEADLINE
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
