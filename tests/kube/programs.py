"""Runs the programs of a cluster: each with a log, in the network of a node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".tools" / "bin"


def run(*argv: object, **options: object) -> str:
    """Runs a command; returns its output. Raises AssertionError with what it says."""
    words = [str(word) for word in argv]
    settings = {"capture_output": True, "text": True, "timeout": 120} | options
    result = subprocess.run(words, **settings)  # type: ignore[call-overload]
    assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout}{result.stderr}"
    return str(result.stdout)


class Sandbox:
    """The network and the mounts of a node, which has a /run/thalweg of its own."""

    def __init__(self) -> None:
        script = "mkdir -p /run/thalweg && mount -t tmpfs tmpfs /run/thalweg && echo up && exec cat"
        command = ["unshare", "--net", "--mount", "sh", "-c", script]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n", "no namespaces"
        self.pid = self._process.pid
        self.prefix = ["nsenter", f"--target={self.pid}", "--net", "--mount"]

    def run(self, *argv: object) -> str:
        return run(*self.prefix, *argv)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Programs:
    """Programs that run until `stop`; their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        argv: Sequence[object],
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        """Starts the program argv[0] of .tools/bin, `prefix` before its command line."""
        words = [*prefix, str(BIN / str(argv[0])), *map(str, argv[1:])]
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
                cwd=self._folder,
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def said(self) -> str:
        """Returns the ends of all logs, and which programs have ended."""
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        tails = [f"--- {n}\n{self.log(n).read_text(errors='replace')[-1500:]}" for n in ended]
        return "\n".join([f"ended: {ended}", *tails])

    def end(self, name: str) -> None:
        """Ends one program, by SIGKILL if it does not listen."""
        process = self._running.pop(name)
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        for name in reversed(list(self._running)):
            self.end(name)
