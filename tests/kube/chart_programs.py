"""Runs the real programs on this machine as the chart runs them in containers.

Ports become 0, the socket's folder a temporary one; everything else is as rendered.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rendered import arguments, variables

from thalweg import _binaries
from thalweg._job._processes import Server


def environment(container: dict[str, Any], folder: Path, **changes: str) -> dict[str, str]:
    """Returns this environment without Thalweg's variables, the container's, and `changes`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("THALWEG_", "AIAK_"))}
    env |= variables(container, "127.0.0.1")
    return env | changes | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def start(name: str, container: dict[str, Any], folder: Path, **env: str) -> Server:
    """Starts a server program with the container's arguments, on free ports."""
    own = environment(container, folder, **env)
    argv = [a.replace("0.0.0.0", "127.0.0.1") for a in arguments(container, own)]
    argv = [re.sub(r":\d+(-\d+)?$", ":0", a) for a in argv]
    argv = [a.replace("/run/thalweg", str(folder)) for a in argv]
    server = Server(name, [str(_binaries.find(name)), *argv], env=own)
    server.wait_ready(20)
    return server


def addresses(servers: list[Server]) -> str:
    return ",".join(server.address for server in servers)


def torchrun(arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
