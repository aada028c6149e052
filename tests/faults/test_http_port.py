"""Attacks on a server's HTTP port."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from scene import STALL, scene
from stranger import PATIENCE
from waiting import pass_time

pytestmark = pytest.mark.alone


def connect(http):
    host, port = http.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def test_bodies_in_chunks_are_not_kept(tmp_path):
    piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with scene(tmp_path, "4 HTTP bodies of 400 MiB in chunks", before="2.1 GiB") as attacked:
        for _ in range(4):
            with connect(attacked.server.http) as client, contextlib.suppress(ConnectionError):
                client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(400):
                    client.sendall(piece)
                client.sendall(b"0\r\n\r\n")
                client.recv(1 << 16)
        attacked.assert_unharmed()


class SlowRequests:
    """Connections that send a header byte by byte; one that is closed is opened again."""

    def __init__(self, http, count):
        self._http = http
        self._sockets = [self._open() for _ in range(count)]

    def _open(self):
        client = connect(self._http)
        client.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        return client

    def send_a_byte(self):
        for i, client in enumerate(self._sockets):
            try:
                client.sendall(b"x")
            except ConnectionError:
                client.close()
                self._sockets[i] = self._open()

    def close(self):
        for client in self._sockets:
            client.close()


@pytest.mark.long
def test_slow_requests_do_not_hold_up_probes(tmp_path):
    unanswered = 0
    before = "`/healthz` silent for 41 s"
    with scene(tmp_path, "8 slow HTTP sockets", before=before) as attacked:
        with contextlib.closing(SlowRequests(attacked.server.http, 8)) as slow:
            end = time.monotonic() + 7  # beyond the time that a socket may be silent
            while time.monotonic() < end:
                slow.send_a_byte()
                try:
                    attacked.page("/healthz", timeout=STALL)
                except OSError:
                    unanswered += 1
                pass_time(0.1)
        attacked.assert_unharmed()
    assert unanswered == 0
