"""Connections that say nothing, or only that they are there."""

from __future__ import annotations

import socket

import pytest
from certificates import Authority
from harness import servers
from stranger import RawHttp2, seconds_until_closed

pytestmark = pytest.mark.alone

SILENT, SHAKING_HANDS = 15, 20  # seconds after which a connection is closed
SLACK = 3  # seconds that a busy machine may take longer


@pytest.mark.long
def test_silent_connection_is_closed():
    with servers(shards=1) as cluster, RawHttp2(cluster.aggregators[0].address) as connection:
        assert SILENT - 1 < connection.seconds_until_closed() < SILENT + SLACK


@pytest.mark.long
def test_connection_that_does_not_finish_its_handshake_is_closed(tmp_path):
    secret = Authority(tmp_path / "authority").issue("all", "127.0.0.1")
    with servers(shards=1, env=secret.environment()) as cluster:
        host, port = cluster.aggregators[0].address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as client:
            assert SHAKING_HANDS - 1 < seconds_until_closed(client) < SHAKING_HANDS + SLACK


def test_pings_that_come_too_early_end_the_connection():
    handled = 0
    with servers(shards=1) as cluster, RawHttp2(cluster.aggregators[0].address) as connection:
        while handled < 10 and connection.await_handled():
            handled += 1
    # The first one is in time, two may be early. The server's settings excuse one, and the last one
    # may be answered before the end.
    assert 3 <= handled <= 5
