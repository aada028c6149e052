"""Attacks by connections, streams and calls: many, and cheap for whoever makes them."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time

import grpc
import pytest
import wire_messages
from bystander import PATIENCE
from harness import metric
from marks import fails_today
from scene import THREADS, scene
from stranger import RawHttp2

pytestmark = pytest.mark.alone

HEARTBEAT, STREAM = "/thalweg.v1.Control/Heartbeat", "/thalweg.v1.Exchange/Stream"
both_shards = pytest.mark.parametrize("hosted", [False, True], ids=["aggregator", "hosted"])


@pytest.mark.long
@both_shards
@pytest.mark.parametrize("path", [HEARTBEAT, STREAM], ids=["call", "stream"])
def test_rapid_reset_costs_neither_threads_nor_memory(path, hosted, tmp_path):
    with scene(tmp_path, hosted=hosted) as attacked:
        with RawHttp2(attacked.address) as connection:
            if connection.open_and_reset(path, 20_000):
                connection.await_handled()
        attacked.assert_unharmed()


@pytest.mark.long
@both_shards
def test_compressed_message_is_refused_before_it_is_inflated(hosted, tmp_path):
    with scene(tmp_path, hosted=hosted) as attacked:
        with attacked.stranger() as stranger:
            stranger.refusal("Probe", bytes(400 << 20), compression=grpc.Compression.Gzip)
        attacked.assert_unharmed()


def await_jobs(attacked, at_least, at_most, seconds=PATIENCE):
    """Returns the shard's number of jobs once it is within the limits, or at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        jobs = metric(attacked.server, "thalweg_aggregator_jobs")
        if at_least <= jobs <= at_most or time.monotonic() > deadline:
            return jobs
        select.select([], [], [], 0.05)


def wait_in_joins(attacked, stranger, count):
    """Begins calls of Join that wait for a node that never comes, until the shard has them."""
    calls = [
        stranger.begin("Join", wire_messages.join_request(f"w{i}", nodes=2), timeout=3600)
        for i in range(count)
    ]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        refused = sum(call.done() for call in calls)
        if metric(attacked.server, "thalweg_aggregator_jobs") + refused >= count:
            return
        select.select([], [], [], 0.05)


@pytest.mark.long
def test_joins_that_wait_take_no_threads(tmp_path):
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            wait_in_joins(attacked, stranger, 5 * THREADS)
        attacked.assert_unharmed()


@pytest.mark.long
def test_joins_that_wait_end_with_their_caller(tmp_path):
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            wait_in_joins(attacked, stranger, 20)
        assert await_jobs(attacked, 1, 1) == 1


@both_shards
def test_garbage_pings_idle_connections_and_guessed_tokens_do_no_harm(hosted, tmp_path):
    with scene(tmp_path, hosted=hosted) as attacked, contextlib.ExitStack() as stack:
        host, port = attacked.address.rsplit(":", 1)
        rng = random.Random(1)
        for idle in range(300):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            if idle % 2:
                client.sendall(rng.randbytes(500))
        with RawHttp2(attacked.address) as connection:
            if connection.ping(20_000):
                connection.await_handled()
        with attacked.stranger() as stranger:
            for token in range(1, 300):
                request = wire_messages.message("HeartbeatRequest", token=token)
                assert stranger.refusal("Heartbeat", request) == grpc.StatusCode.NOT_FOUND
        attacked.assert_unharmed()
