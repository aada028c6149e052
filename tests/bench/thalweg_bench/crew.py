"""Forks workers and sends them commands through pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from thalweg._job._processes import describe_exit, die_with_parent
from thalweg_bench.rows import BenchError


class Crew:
    """Children of this process, each with an object whose do_* methods this process calls.

    Fork in a process without other threads: children inherit what was imported. One thread may use
    it.
    """

    def __init__(self) -> None:
        self._names: dict[Connection, str] = {}
        self._pids: dict[Connection, int] = {}

    @property
    def pids(self) -> list[int]:
        return list(self._pids.values())

    def fork(self, name: str, make: Callable[[], object]) -> None:
        """Forks a child, in which `make` runs; its object serves the calls."""
        prepare = die_with_parent(signal.SIGKILL)
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                # The parent handles Ctrl-C and ends its children.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                prepare()
                for other in (ours, *self._names):
                    other.close()
                _serve(theirs, make)
            os._exit(0)
        theirs.close()
        self._names[ours], self._pids[ours] = name, pid

    def call(self, method: str, *arguments: object, seconds: float) -> list[Any]:
        """Calls the method in all children at once; returns results in order of forking.

        Raises BenchError that names the children that failed, died or did not answer within
        `seconds`.
        """
        for connection in self._names:
            with contextlib.suppress(OSError):  # the next receive reports that it died
                connection.send((method, arguments))
        results: dict[Connection, object] = {}
        deadline = time.monotonic() + seconds
        while missing := [c for c in self._names if c not in results]:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(self._names[c] for c in missing)
                raise BenchError(f"no answer within {seconds:.0f} s to '{method}' from: {names}")
            for connection in missing:
                if connection in ready:
                    results[connection] = self._receive(connection, method)
        return [results[connection] for connection in self._names]

    def _receive(self, connection: Connection, method: str) -> object:
        try:
            ok, value = connection.recv()
        except (EOFError, OSError):
            _, status = os.waitpid(self._pids.pop(connection), 0)
            how = describe_exit(os.waitstatus_to_exitcode(status))
            raise BenchError(f"{self._names[connection]} {how} during '{method}'") from None
        if not ok:
            raise BenchError(f"{self._names[connection]}: '{method}' failed: {value}")
        return value

    def kill(self) -> None:
        """Kills all children. May be called again."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        for connection in self._names:
            connection.close()
        self._pids.clear()
        self._names.clear()


def _serve(connection: Connection, make: Callable[[], object]) -> None:
    target: object | None = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if target is None:
                target = make()
            answer = (True, getattr(target, f"do_{method}")(*arguments))
        except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)
