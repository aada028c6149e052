"""Starts server programs and waits until they serve."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ServerError(RuntimeError):
    """A server program did not start."""


class Server:
    """A server program that announces itself, or why it ends: one JSON line on the descriptor of
    --ready-fd.

    Not thread-safe. The program outlives this object.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.address = ""
        self.http = ""
        self._ready_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            # The server gets its own session: Ctrl-C reaches the process that started it, not the
            # server.
            self.process = subprocess.Popen(
                [*argv, "--ready-fd", str(write_fd)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(write_fd,),
                start_new_session=True,
                preexec_fn=preexec,
            )
        except OSError as error:
            os.close(self._ready_fd)
            raise ServerError(f"{name} cannot be started: {error}") from error
        finally:
            os.close(write_fd)

    def wait_ready(self, timeout: float) -> None:
        """Sets `address` and `http`. On ServerError the program has been stopped."""
        try:
            line = _read_line(self._ready_fd, time.monotonic() + timeout)
        except TimeoutError:
            self.stop(grace=0)
            raise ServerError(f"{self.name} was not ready within {timeout:g} s") from None
        finally:
            os.close(self._ready_fd)
        try:
            ready = json.loads(line)
            if set(ready) == {"error"}:
                self.stop(grace=1)
                raise ServerError(f"{self.name}: {ready['error']}")
            self.address, self.http = str(ready["address"]), str(ready["http"])
        except (ValueError, KeyError, TypeError) as error:
            code = self.stop(grace=1)
            if not line:
                raise ServerError(
                    f"{self.name} {describe_exit(code)} before it was ready (its message is above)"
                ) from None
            raise ServerError(f"{self.name} announced itself with {line!r}") from error

    def stop(self, grace: float) -> int:
        """Sends SIGTERM, then SIGKILL after `grace` seconds; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            return self.process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def die_with_parent(signum: signal.Signals) -> Callable[[], None]:
    """Gives the child `signum` when the calling *thread* ends in any way; for Popen's preexec_fn.

    Call it, and Popen, on the main thread of a process that has no other threads.
    """
    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return prepare


def describe_exit(code: int) -> str:
    """Describes Popen's return code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _read_line(fd: int, deadline: float) -> bytes:
    """Reads until a newline or the end of the file."""
    line = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError
        data = os.read(fd, 4096)
        if not data:
            break
        line += data
    return line
