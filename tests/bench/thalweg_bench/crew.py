"""Forks workers and sends them commands through pipes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from thalweg._job._processes import describe_exit, die_with_parent
from thalweg_bench.rows import BenchError


class Crew:
    """Children of this process, each with an object whose do_* methods this process calls.

    Fork in a process without other threads: children inherit what was imported. One thread may use
    it.
    """

    def __init__(self) -> None:
        self._children: dict[Connection, BaseProcess] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._children.values() if process.pid is not None]

    def fork(self, name: str, make: Callable[[], object]) -> None:
        """Forks a child, in which `make` runs; its object serves the calls."""
        prepare = die_with_parent(signal.SIGKILL)
        ours, theirs = Pipe()

        def serve() -> None:
            # The parent handles Ctrl-C and ends its children.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            prepare()
            for other in (ours, *self._children):
                other.close()
            _serve(theirs, make)

        process = get_context("fork").Process(target=serve, name=name, daemon=True)
        process.start()
        theirs.close()
        self._children[ours] = process

    def call(self, method: str, *arguments: object, seconds: float) -> list[Any]:
        """Calls the method in all children at once; returns results in order of forking.

        Raises BenchError that names the children that failed, died or did not answer within
        `seconds`.
        """
        for connection in self._children:
            with contextlib.suppress(OSError):  # the next receive reports that it died
                connection.send((method, arguments))
        results: dict[Connection, object] = {}
        deadline = time.monotonic() + seconds
        while missing := [c for c in self._children if c not in results]:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(self._children[c].name for c in missing)
                raise BenchError(f"no answer within {seconds:.0f} s to '{method}' from: {names}")
            for connection in missing:
                if connection in ready:
                    results[connection] = self._receive(connection, method)
        return [results[connection] for connection in self._children]

    def _receive(self, connection: Connection, method: str) -> object:
        process = self._children[connection]
        try:
            ok, value = connection.recv()
        except (EOFError, OSError):
            process.join()
            how = describe_exit(process.exitcode or 0)
            raise BenchError(f"{process.name} {how} during '{method}'") from None
        if not ok:
            raise BenchError(f"{process.name}: '{method}' failed: {value}")
        return value

    def kill(self) -> None:
        """Kills all children. May be called again."""
        for process in self._children.values():
            process.kill()
        for connection, process in self._children.items():
            process.join()
            connection.close()
        self._children.clear()


def _serve(connection: Connection, make: Callable[[], object]) -> None:
    target: object | None = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            target = make() if target is None else target
            answer = (True, getattr(target, f"do_{method}")(*arguments))
        except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)
