"""A TCP proxy whose connections can be reset."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from harness import Job

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
_BYTES = 1 << 16


class BreakingProxy:
    """Forwards bytes between whoever connects to `address` and the target, in a thread.

    Other threads may call reset() and read `resets`, the number of connections that were reset.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.resets = 0
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def reset(self) -> None:
        self._wake.send(b"r")

    def reset_often(self, job: Job, count: int, pause: Callable[[], int] = lambda: 1) -> None:
        """Resets until `count` connections were reset, each time after `pause` more rounds of the
        job, which must not end before: attempts that never get far would make it give up.
        """
        while self.resets < count:
            job.await_rounds(pause())
            self.reset()

    def close(self) -> None:
        self._wake.send(b"q")
        self._thread.join()

    def _run(self) -> None:
        for readable in (self._listener, self._woken):
            self._selector.register(readable, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._listener:
                    self._accept()
                elif ready is self._woken:
                    asked = ready.recv(_BYTES)
                    self._reset_all()
                    if b"q" in asked:
                        return
                elif ready in self._peers:  # otherwise it was dropped in this turn
                    self._forward(ready)

    def _accept(self) -> None:
        ends = [self._listener.accept()[0]]
        try:
            ends.append(socket.create_connection(self._target, 5))
        except OSError:
            _close(ends[0])
            return
        for end, other in (ends, ends[::-1]):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            received = end.recv(_BYTES)
            self._peers[end].sendall(received)
        except OSError:
            received = b""
        if not received:
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        for each in (end, self._peers[end]):
            self._selector.unregister(each)
            del self._peers[each]
            _close(each)
        self.resets += 1

    def _reset_all(self) -> None:
        while self._peers:
            self._drop(next(iter(self._peers)))


def _close(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()


@contextlib.contextmanager
def proxy(target: str) -> Iterator[BreakingProxy]:
    running = BreakingProxy(target)
    try:
        yield running
    finally:
        running.close()
