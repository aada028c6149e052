"""Supervises processes that live and die together and merges their output into one stream."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from thalweg._job._processes import describe_exit, die_with_parent
from thalweg.cli import _streams

GRACE_SECONDS = 5.0
_MAX_LINE_BYTES = 64 << 10


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP reached this process."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(eq=False)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    is_worker: bool
    pidfd: int


@dataclass(frozen=True)
class _Pipe:
    prefixer: LinePrefixer
    output: TextIO


class LinePrefixer:
    """Turns a stream of bytes into whole lines with a prefix.

    For a line that rewrites itself with carriage returns (a progress bar), only the last state is
    kept.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        # The newest state is complete only when the next carriage return has arrived.
        self._rest = b"\r".join(rest.split(b"\r")[-2:])
        return b"".join(self._line(line) for line in lines)

    def finish(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest.strip() else b""

    def _line(self, line: bytes) -> bytes:
        states = [state for state in line.split(b"\r") if state]
        return self._prefix + (states[-1] if states else b"") + b"\n"


class Supervisor:
    """Runs everything on one thread, because a child's parent-death signal is tied to its parent's
    thread.

    Use it as a context manager on the main thread: it handles SIGINT and SIGTERM meanwhile,
    and SIGHUP, unless that is ignored (nohup).
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._outputs = (stdout, stderr)
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._old_handlers: dict[int, object] = {}
        self._interrupt = 0
        self._raise_at_once = False
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_wakeup = -1

    def __enter__(self) -> Supervisor:
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup_writer)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal() returned
        self._selector.close()
        os.close(self._wakeup)
        os.close(self._wakeup_writer)

    @contextlib.contextmanager
    def pipes(
        self, name: str, to_terminal: bool = False
    ) -> Iterator[tuple[int | None, int | None]]:
        """Returns a child's standard output and error; None where it may write to our terminal."""
        writers: list[int | None] = []
        for output in self._outputs:
            if to_terminal and output.isatty():
                writers.append(None)
                continue
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            pipe = _Pipe(LinePrefixer(f"[{name}] "), output)
            self._selector.register(reader, selectors.EVENT_READ, pipe)
            writers.append(writer)
        try:
            yield writers[0], writers[1]
        finally:
            for fd in writers:
                if fd is not None:
                    os.close(fd)

    def start_worker(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str], to_terminal: bool
    ) -> None:
        self._raise_if_interrupted()
        with self.pipes(name, to_terminal) as (stdout, stderr):
            # The process gets its own group, so that stop() also reaches what the worker has
            # started.
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self.watch(name, process, is_worker=True)

    def watch(self, name: str, process: subprocess.Popen[bytes], *, is_worker: bool) -> None:
        child = _Child(name, process, is_worker, os.pidfd_open(process.pid))
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def say(self, text: str) -> None:
        self._write(self._outputs[1], f"[thalweg] {text}\n".encode())

    def wait(self) -> int:
        """Waits until all workers are done or one process has failed, and returns the exit code."""
        while True:
            ended = self._poll(None)
            failed = [c for c in ended if not c.is_worker or c.process.returncode != 0]
            for child in failed:
                self.say(f"{child.name} {describe_exit(child.process.returncode)}")
            if failed:
                return max(_exit_code(child) for child in failed)
            if not any(child.is_worker for child in self._children):
                return 0
            self._raise_if_interrupted()

    def stop(self) -> None:
        """Ends all processes, workers first, and forwards their remaining output."""
        for is_worker in (True, False):
            doomed = [child for child in self._children if child.is_worker == is_worker]
            _signal_groups(doomed, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while any(c in self._children for c in doomed) and time.monotonic() < deadline:
                self._poll(deadline - time.monotonic())
            late = [child for child in doomed if child in self._children]
            _signal_groups(late, signal.SIGKILL)
            for child in late:
                self.say(f"{child.name} did not end within {GRACE_SECONDS:g} s and was killed")
            while any(child in self._children for child in late):
                self._poll(None)
        self._drain()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Makes signals raise Interrupted inside at any point, not only in wait() and start()."""
        self._raise_if_interrupted()
        self._raise_at_once = True
        try:
            yield
        finally:
            self._raise_at_once = False

    def _poll(self, timeout: float | None) -> list[_Child]:
        """Waits for output, which it forwards, or for the end of children, which it returns."""
        ended = []
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, _Pipe):
                self._forward(key.fd, key.data)
            elif isinstance(key.data, _Child):
                self._reap(key.data)
                ended.append(key.data)
            else:
                os.read(self._wakeup, 512)
        return ended

    def _drain(self) -> None:
        """Forwards what ended processes left in their pipes."""
        while pipes := [key for key, _ in self._selector.select(0) if isinstance(key.data, _Pipe)]:
            for key in pipes:
                self._forward(key.fd, key.data)

    def _reap(self, child: _Child) -> None:
        if child.process.returncode is None:  # a zombie: its number still identifies its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._children.remove(child)

    def _forward(self, fd: int, pipe: _Pipe) -> None:
        data = os.read(fd, 1 << 16)
        self._write(pipe.output, pipe.prefixer.feed(data) if data else pipe.prefixer.finish())
        if not data:
            self._selector.unregister(fd)
            os.close(fd)

    def _write(self, output: TextIO, data: bytes) -> None:
        if self._interrupt == signal.SIGPIPE:
            return
        try:
            output.buffer.write(data)
            output.buffer.flush()
        except BrokenPipeError:  # the reader has gone: end like a program that SIGPIPE kills
            self._interrupt = signal.SIGPIPE
        except OSError as error:  # such as a full disk, which is no reason to end a training
            self._drop(output, error)

    def _drop(self, output: TextIO, error: OSError) -> None:
        """Lets nothing more be written to `output`, also of what it holds; says so on the other."""
        _streams.discard(output)
        index = self._outputs.index(output)
        name = ("standard output", "standard error")[index]
        text = f"[thalweg] {name} cannot be written: {error.strerror}; what follows of it is lost\n"
        self._write(self._outputs[1 - index], text.encode())

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        self._interrupt = signum
        if self._raise_at_once:
            self._raise_if_interrupted()

    def _raise_if_interrupted(self) -> None:
        if self._interrupt:
            self.say(f"{signal.Signals(self._interrupt).name}: ending all processes")
            raise Interrupted(self._interrupt)


def _signal_groups(children: Sequence[_Child], signum: signal.Signals) -> None:
    for child in children:
        if child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signum)


def _exit_code(child: _Child) -> int:
    """Returns a shell's exit code: 128 + signal. A server that ends by itself has failed."""
    code = child.process.returncode
    if not child.is_worker:
        return 1
    return code if code >= 0 else 128 - code
