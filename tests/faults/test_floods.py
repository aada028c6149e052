"""Attacks by connections, streams and calls: many, and cheap for whoever makes them."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket

import grpc
import pytest
import wire_messages
from bystander import PATIENCE
from harness import metric
from scene import scene
from stranger import RawHttp2
from waiting import until

pytestmark = pytest.mark.alone

HEARTBEAT, STREAM = "/thalweg.v1.Control/Heartbeat", "/thalweg.v1.Exchange/Stream"
UNKNOWN = "/nobody/Knows"
both_shards = pytest.mark.parametrize("hosted", [False, True], ids=["aggregator", "hosted"])


@both_shards
@pytest.mark.parametrize("path", [HEARTBEAT, STREAM, UNKNOWN], ids=["call", "stream", "unknown"])
def test_rapid_reset_costs_neither_threads_nor_memory(path, hosted, tmp_path):
    attack = f"150 000 resets of `{path.rsplit('/', 1)[1]}` on a connection"
    before = "14 571 threads, 704 MiB, job lost"
    with scene(tmp_path, attack, before=before, hosted=hosted) as attacked:
        with RawHttp2(attacked.address) as connection:
            if connection.open_and_reset(path, 150_000):
                connection.await_handled()
        attacked.assert_unharmed()


@pytest.mark.long
@both_shards
def test_compressed_message_is_refused_before_it_is_inflated(hosted, tmp_path):
    before = "1.1 GiB, stall of 7.6 s"
    with scene(tmp_path, "400 MiB compressed to 0.4", before=before, hosted=hosted) as attacked:
        with attacked.stranger() as stranger:
            refusal = stranger.refusal("Probe", bytes(400 << 20), compression=grpc.Compression.Gzip)
            assert refusal == grpc.StatusCode.UNIMPLEMENTED
        attacked.assert_unharmed()


@pytest.mark.long
def test_streams_that_say_nothing_are_few_also_where_settings_do_not_count(tmp_path):
    attack = "20 connections of 10 000 streams each that say nothing"
    with scene(tmp_path, attack) as attacked:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(RawHttp2(attacked.address))
                if connection.open(STREAM, 10_000):
                    connection.await_handled()
        attacked.assert_unharmed()


def wait_in_joins(attacked, stranger, count):
    """Begins calls of Join that wait for a node that never comes; returns them when the shard has
    them. They end when nobody refers to them any more."""
    jobs = metric(attacked.server, "thalweg_shard_jobs")
    names = [secrets.token_hex(8) for _ in range(count)]
    calls = [
        stranger.begin("Join", wire_messages.join_request(name, nodes=2), timeout=3600)
        for name in names
    ]

    def are_there():
        refused = sum(call.done() for call in calls)
        return metric(attacked.server, "thalweg_shard_jobs") + refused >= jobs + count

    until(f"{count} more jobs of the shard", are_there, PATIENCE, every=0.05)
    return calls


@pytest.mark.long
def test_joins_that_wait_take_no_threads(tmp_path):
    with scene(tmp_path, "2000 `Join`s that wait", before="2018 threads for an hour") as attacked:
        with contextlib.ExitStack() as stack:
            calls = []
            for _ in range(40):  # a connection has up to 64 calls
                calls += wait_in_joins(attacked, stack.enter_context(attacked.stranger()), 50)
        attacked.assert_unharmed()


def test_joins_that_wait_end_with_their_caller(tmp_path):
    with scene(tmp_path, "20 `Join`s that wait, and go") as attacked:
        with attacked.stranger() as stranger:
            calls = wait_in_joins(attacked, stranger, 20)
            assert not any(call.done() for call in calls)
        assert attacked.jobs(at_most=1) == 1


@both_shards
def test_garbage_pings_idle_connections_and_guessed_tokens_do_no_harm(hosted, tmp_path):
    attack = "garbage, pings, idle connections, guessed tokens"
    with contextlib.ExitStack() as stack:
        attacked = stack.enter_context(scene(tmp_path, attack, before="no harm", hosted=hosted))
        with contextlib.ExitStack() as connections:
            host, port = attacked.address.rsplit(":", 1)
            rng = random.Random(1)
            for idle in range(300):  # another host than those of the job and of the stranger
                client = connections.enter_context(
                    socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
                )
                if idle % 2:
                    with contextlib.suppress(ConnectionError):  # one host may open half of 341
                        client.sendall(rng.randbytes(500))
            with RawHttp2(attacked.address) as connection:
                if connection.ping(20_000):
                    connection.await_handled()
            with attacked.stranger() as stranger:
                for token in range(1, 300):
                    request = wire_messages.message("HeartbeatRequest", token=token)
                    assert stranger.refusal("Heartbeat", request) == grpc.StatusCode.NOT_FOUND
        attacked.assert_unharmed()
