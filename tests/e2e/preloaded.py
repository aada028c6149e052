"""Starts Python scripts in processes that have loaded torch already, which saves 3 s of each.

start() sends a request to a server, `preloaded.py` as a program. That has imported torch, without
what the environment has its backends do, and forks. In the new process Thalweg is activated as at
the end of `import torch`, and the script runs as `__main__`.

Three things differ from a process of its own: the seed of Python's hashes is the server's; what
`import torch` reads of the environment is what the server was started with, and must_load() says
which variables forbid that; and a script that succeeds ends after the functions of atexit, with all
modules in place, because taking them apart copies most of the server's memory.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# What Python, torch or the libraries beneath it read when they start.
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH", "THALWEG_COMPAT")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Process:
    """A process of the server, with what tests use of subprocess.Popen."""

    def __init__(self, argv: Sequence[str], status: int) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def must_load(names: Iterable[str]) -> bool:
    """Returns whether a process with these variables of its own must load torch itself.

    On a machine with GPUs it must: what torch looks up when it is loaded may begin to use CUDA,
    which does not survive a fork.
    """
    return Path("/dev/nvidiactl").exists() or any(name.startswith(_READ_EARLY) for name in names)


def start(
    argv: Sequence[str], env: Mapping[str, str], log: Path, base: Mapping[str, str]
) -> Process:
    """Starts a script; both streams of its output go to `log`.

    `base` is the environment of the server: it is that of all scripts but for what they may read
    late. TMPDIR stays open as long as the process lives, by which processes_below() finds it.
    """
    ours, theirs = os.pipe()
    request = {"argv": list(argv), "env": dict(env), "log": str(log)}
    try:
        message = json.dumps(request).encode()
        socket.send_fds(_server(frozenset(base.items())), [message], [theirs])
    finally:
        os.close(theirs)
    return Process(argv, ours)


@functools.cache
def _server(base: frozenset[tuple[str, str]]) -> socket.socket:
    """Returns the connection to a server with this environment, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=dict(base) | {_AUTOLOAD: "0"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not a terminal: scripts write to files
        )

    def stop() -> None:
        ours.close()
        server.wait(20)

    atexit.register(stop)
    return ours


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Returns in every process that is to run a script, with the request, and nowhere else."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not message:
            os._exit(0)
        [status] = files
        if os.fork() == 0:
            break
        os.close(status)
    # A process between the server and the script reports how the script ends.
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return dict(json.loads(message))
    os.write(status, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, f"{code}\n".encode())
    os._exit(0)


def _become(argv: list[str], env: dict[str, str], log: str) -> types.CodeType:
    """Makes this process one that was started with these; returns the script's code."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    os.open(env["TMPDIR"], os.O_RDONLY | os.O_DIRECTORY)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    return compile(Path(argv[0]).read_bytes(), argv[0], "exec", dont_inherit=True)


def _main() -> types.CodeType:
    import torch
    import torch._dynamo  # the first optimizer would load it

    tasks = list(Path("/proc/self/task").iterdir())
    assert len(tasks) == 1, f"a process with {len(tasks)} threads must not fork"
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    code = _become(**request)
    if os.environ.get(_AUTOLOAD, "1") == "1":
        torch._import_device_backends()
    return code


def _end() -> NoReturn:
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _code = _main()
    _script = types.ModuleType("__main__")
    _script.__dict__.update(__file__=sys.argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = _script
    exec(_code, _script.__dict__)
    _end()
