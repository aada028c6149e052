"""Attacks by what jobs claim of a shard: seats, nodes, layouts and windows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets

import grpc
import pytest
import wire_messages
from bystander import PATIENCE
from harness import TIMEOUT, servers
from marks import fails_today
from scene import scene, start_aggregator
from shard_nodes import JOB, session
from stranger import Stranger

pytestmark = pytest.mark.alone

MAX_JOBS = 1024
MAX_NODES = 4096
MAX_MESSAGE = 8 << 20
MAX_CHUNK, MAX_WINDOW = 4 << 20, 1024
ANSWER = 4 << 20  # bytes that an answer of the API may have


def take_seats(stranger, count):
    """Joins jobs of one node each, and opens no stream; returns how many were refused."""
    requests = [wire_messages.join_request(f"seat{i}") for i in range(count)]
    return sum(stranger.refusal("Join", request) is not None for request in requests)


@pytest.mark.long
def test_seats_without_a_stream_expire(tmp_path):
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            take_seats(stranger, MAX_JOBS)
        attacked.assert_unharmed()


@pytest.mark.long
def test_seats_without_a_stream_do_not_delay_the_end(tmp_path):
    with servers() as cluster:
        server = start_aggregator(cluster, tmp_path / "log", "--drain-seconds", "60")
        with Stranger(server.address) as stranger:
            take_seats(stranger, 1)
        assert server.stop(grace=PATIENCE) == 0


def test_hosted_shard_gives_strangers_no_seats(tmp_path):
    with scene(tmp_path, hosted=True) as attacked:
        with attacked.stranger() as stranger:
            assert take_seats(stranger, MAX_JOBS) == MAX_JOBS
        attacked.assert_unharmed()


@pytest.mark.long
def test_layouts_of_empty_tensors_are_refused(tmp_path):
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            token = stranger.call("Join", wire_messages.join_request("layouts")).token
            empty_tensors = b"\x22\x00" * (MAX_MESSAGE // 2)
            for index in range(4):
                request = wire_messages.message(
                    "RegisterBucketRequest", token=token, bucket={"index": index}, dtype=1, wire=1
                )
                stranger.refusal("RegisterBucket", request.SerializeToString() + empty_tensors)
        attacked.assert_unharmed()


@pytest.mark.long
def test_claimed_nodes_do_not_swell_the_answers_of_the_api(tmp_path):
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            calls = [
                stranger.begin("Join", wire_messages.join_request(f"n{i}", nodes=MAX_NODES))
                for i in range(60)
            ]
            stranger.call("Probe", b"")  # after what this connection has sent before
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(attacked.page, ["/api/v1/jobs"] * 4))
            del calls
        assert max(map(len, answers)) <= ANSWER
        attacked.assert_unharmed()


@pytest.mark.long
def test_window_that_is_never_answered_stays_within_the_memory_of_the_shard(tmp_path):
    chunks = 128  # of MAX_WINDOW
    elems = MAX_CHUNK // 4
    with scene(tmp_path) as attacked:
        with attacked.stranger() as stranger:
            settings = {"chunk_bytes": MAX_CHUNK, "window_chunks": MAX_WINDOW}
            joining = [
                stranger.begin(
                    "Join", wire_messages.join_request("window", node=node, nodes=2, **settings)
                )
                for node in range(2)
            ]
            with contextlib.suppress(grpc.RpcError):
                token = joining[0].result().token
                stranger.call(
                    "RegisterBucket",
                    wire_messages.message(
                        "RegisterBucketRequest",
                        token=token,
                        dtype=1,
                        wire=1,
                        tensors=[{"name": "w", "shape": [chunks * elems]}],
                    ),
                )
                stream = stranger.stream()
                stream.send(wire_messages.message("Frame", open={"token": token, "num_streams": 1}))
                payload = bytes(MAX_CHUNK)
                for chunk in range(chunks):
                    contribution = {"epoch": 1, "chunk": chunk, "round": 1, "wire": 1}
                    contribution |= {"elems": elems, "payload": payload}
                    if not stream.send(wire_messages.message("Frame", chunk=contribution)):
                        break
                stream.finish()
        attacked.assert_unharmed()


def test_stranger_who_contradicts_a_job_while_it_gathers_neither_fails_nor_delays_it():
    with (
        servers(shards=1) as cluster,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
        Stranger(cluster.aggregators[0].address) as stranger,
    ):
        sidecars = [cluster.add_sidecar(aggregators="").address for _ in range(2)]
        shards, secret = [cluster.aggregators[0].address], secrets.token_hex(32)

        def join(node):
            return session(sidecars[node], node, shards, [-1], secret)

        first = pool.submit(join, 0)
        contradictions = [
            wire_messages.join_request(JOB, node=node, nodes=nodes)
            for node, nodes in [(0, 2), (1, 2), (0, 3)]
        ]
        calls = [stranger.begin("Join", request) for request in contradictions]
        calls[-1].exception()  # contradicts the stranger's own job
        for joined in [first, pool.submit(join, 1)]:
            joined.result(TIMEOUT).close()
