"""Finds ports for the programs of tests that run side by side."""

from __future__ import annotations

import collections
import contextlib
import socket

from thalweg._job import _addresses

_MOST = 100  # of the last ports: a program has long bound those that were given before
_marks: collections.deque[socket.socket] = collections.deque()


def free_port(count: int = 1) -> int:
    """Returns a port, the first of `count` consecutive ones, that nobody uses, that the kernel
    gives to nobody who asks for any, and this function to no other test, whichever process that is.
    """
    while True:
        first = _addresses.free_port()
        ports = range(first, first + count)
        if all(map(_is_free, ports[1:])) and all(map(_mark, ports)):
            return first


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def _mark(port: int) -> bool:
    """Takes a name for the port that no two sockets can have, and that ends with this process.

    Returns whether nobody has it.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0thalweg's tests use port {port}")
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    if len(_marks) > _MOST:
        _marks.popleft().close()
    return True
