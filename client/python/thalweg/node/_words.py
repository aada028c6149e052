"""Carries messages between the workers of a node that reduce among themselves.

Each follower has a socket to the node's leader. Either side learns at once when the other is gone
and can end the connection; collectives offer neither.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

Words = dict[str, Any]  # "kind" determines the other keys

SILENCES = 4  # a leader sends this many messages per timeout
_SEND_SECONDS = 10  # the other end may read nothing for so long
_HELLO_SECONDS = 1.0  # from connecting to the first message
_LONGEST = 64 << 10  # largest message in bytes


class Address(NamedTuple):
    """The address of a leader, and what its followers must know."""

    name: str
    token: str


class Line:
    """One end of a connection: a JSON object per line. One thread may receive, one may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        patience = struct.pack("ll", _SEND_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._received = b""
        # Held where the connection is ended or closed, as a garbage collection may on any thread.
        self._lock = threading.RLock()

    def send(self, words: Words) -> None:
        """Raises OSError when the other end is gone, or has read nothing for too long."""
        self._connection.sendall(json.dumps(words).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Words | None:
        """Returns the next message; None after `seconds` without one. Raises OSError at the end."""
        while b"\n" not in self._received:
            if not self._poller.poll(None if seconds is None else seconds * 1000):
                return None
            data = self._connection.recv(4096)
            if not data or len(self._received) > _LONGEST:
                raise ConnectionResetError("the connection has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):  # the latter if it is nested deeply
            words = json.loads(line)
            if isinstance(words, dict):
                return words
        raise ConnectionResetError(f"the other end sent {line[:80]!r}, expected a JSON object")

    def stop_listening(self) -> None:
        """Ends receiving, and a call of receive(). May be called again, on any thread."""
        self._shut_down(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Ends the connection, and a call of receive(). May be called again, on any thread."""
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, in which nobody sends or receives any more. hang_up() and
        stop_listening() then do nothing.
        """
        with self._lock:
            self._connection.close()

    def _shut_down(self, how: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.shutdown(how)


def listen() -> tuple[socket.socket, Address]:
    """Returns a leader's socket, which every process in the network namespace can reach."""
    address = Address("thalweg-" + secrets.token_hex(16), secrets.token_hex(16))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{address.name}")
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener, address


def accept(
    listener: socket.socket, token: str, followers: set[int], timeout: float
) -> dict[int, Line]:
    """Returns a line to each follower by rank. Raises TimeoutError naming the missing ones."""
    deadline = time.monotonic() + timeout
    lines: dict[int, Line] = {}
    while missing := followers - lines.keys():
        left = max(deadline - time.monotonic(), 0.001)
        try:
            listener.settimeout(left)
            line = Line(listener.accept()[0])
        except TimeoutError:
            raise TimeoutError(
                f"thalweg: rank {', '.join(map(str, sorted(missing)))} of this node did not "
                f"connect to its leader within {timeout:g} s"
            ) from None
        hello: Words = {}
        with contextlib.suppress(OSError):  # a stranger's connection
            hello = line.receive(min(left, _HELLO_SECONDS)) or {}
        said = str(hello.get("token")).encode(errors="replace")
        if hmac.compare_digest(said, token.encode()) and hello.get("rank") in missing:
            lines[hello["rank"]] = line
    return lines


def connect(address: Address, rank: int, timeout: float) -> Line:
    """Returns a follower's line to its leader. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(f"\0{address.name}")
        line = Line(connection)
        line.send({"kind": "hello", "rank": rank, "token": address.token})
    except BaseException:
        connection.close()
        raise
    return line
