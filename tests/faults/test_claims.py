"""Attacks by what jobs claim of a shard: seats, nodes, layouts and windows."""

from __future__ import annotations

import concurrent.futures
import itertools
import secrets

import grpc
import pytest
import wire_messages
from bystander import PATIENCE
from harness import TIMEOUT, servers
from scene import scene, start_aggregator
from shard_nodes import JOB, session
from stranger import Stranger
from waiting import until

pytestmark = pytest.mark.alone

MAX_JOBS = 1024
MAX_NODES = 1024
MAX_CLAIMED = 16384  # by all jobs
MAX_MESSAGE = 8 << 20
MAX_CHUNK, MAX_WINDOW = 4 << 20, 1024
ANSWER = 4 << 20  # bytes that an answer of the API may have
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED


def take_seats(stranger, count):
    """Joins jobs of one node each, and opens no stream; returns how many were refused."""
    requests = [wire_messages.join_request(f"seat{i}") for i in range(count)]
    return sum(stranger.refusal("Join", request) is not None for request in requests)


@pytest.mark.long
def test_seats_without_a_stream_expire(tmp_path):
    before = "no new job until restart"
    with scene(tmp_path, "1024 `Join`s without a stream", before=before) as attacked:
        with attacked.stranger() as stranger:
            take_seats(stranger, MAX_JOBS)
        assert attacked.jobs(at_most=1) == 1
        attacked.assert_unharmed()


def test_seats_without_a_stream_do_not_delay_the_end(tmp_path):
    with servers() as cluster:
        server = start_aggregator(cluster, tmp_path / "log", "--drain-seconds", "60")
        with Stranger(server.address) as stranger:
            take_seats(stranger, 1)
        assert server.stop(grace=PATIENCE) == 0


def test_hosted_shard_gives_strangers_no_seats(tmp_path):
    with scene(tmp_path, "1024 `Join`s without a stream", hosted=True) as attacked:
        with attacked.stranger() as stranger:
            assert take_seats(stranger, MAX_JOBS) == MAX_JOBS
        attacked.assert_unharmed()


def test_layouts_of_empty_tensors_are_refused(tmp_path):
    with scene(tmp_path, "20 layouts of 4 194 304 empty tensors", before="1.3 GiB") as attacked:
        with attacked.stranger() as stranger:
            token = stranger.call("Join", wire_messages.join_request("layouts")).token
            empty_tensors = b"\x22\x00" * (MAX_MESSAGE // 2)
            for index in range(20):
                request = wire_messages.message(
                    "RegisterBucketRequest", token=token, bucket={"index": index}, dtype=1, wire=1
                )
                refusal = stranger.refusal(
                    "RegisterBucket", request.SerializeToString() + empty_tensors
                )
                assert refusal is not None
        attacked.assert_unharmed()


def await_refusals(calls, count):
    def is_enough():
        return sum(call.done() for call in calls) >= count

    until(f"{count} calls refused", is_enough, PATIENCE, every=0.05)
    assert {call.code() for call in calls if call.done()} == {REFUSED}


def test_claimed_nodes_do_not_swell_the_answers_of_the_api(tmp_path):
    with scene(
        tmp_path, "400 jobs of 1024 nodes, then `GET /api/v1/jobs`", before="183 MB answer, > 5 GiB"
    ) as attacked:
        with attacked.stranger() as stranger:
            calls = [
                stranger.begin("Join", wire_messages.join_request(f"n{i}", nodes=MAX_NODES))
                for i in range(400)
            ]
            await_refusals(calls, len(calls) - MAX_CLAIMED // MAX_NODES)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(attacked.page, ["/api/v1/jobs"] * 4))
        assert max(map(len, answers)) <= ANSWER
        attacked.assert_unharmed()


def test_window_that_is_beyond_the_memory_of_the_shard_is_refused(tmp_path):
    settings = {"chunk_bytes": MAX_CHUNK, "window_chunks": MAX_WINDOW}
    request = wire_messages.join_request("window", **settings)
    with scene(tmp_path, "a window of 1024 x 4 MiB, never answered", before="4.1 GiB") as attacked:
        with attacked.stranger() as stranger:
            assert stranger.refusal("Join", request) == REFUSED
        attacked.assert_unharmed()


def send_a_window(stranger, chunks):
    """Sends a node's contributions of a job of two nodes, of which the other one sends nothing."""
    elems = MAX_CHUNK // 4
    settings = {"chunk_bytes": MAX_CHUNK, "window_chunks": chunks}
    joining = [
        stranger.begin("Join", wire_messages.join_request("window", node=node, nodes=2, **settings))
        for node in range(2)
    ]
    token = joining[0].result().token
    tensors = [{"name": "w", "shape": [chunks * elems]}]
    layout = {"token": token, "dtype": 1, "wire": 1, "tensors": tensors}
    stranger.call("RegisterBucket", wire_messages.message("RegisterBucketRequest", **layout))
    stream = stranger.stream()
    stream.send(wire_messages.message("Frame", open={"token": token, "num_streams": 1}))
    for chunk in range(chunks):
        sent = {"epoch": 1, "chunk": chunk, "round": 1, "wire": 1, "elems": elems}
        frame = wire_messages.message("Frame", chunk=sent | {"payload": bytes(MAX_CHUNK)})
        if not stream.send(frame):
            break
    stream.finish()


def test_window_that_is_never_answered_stays_within_the_memory_of_the_shard(tmp_path):
    with scene(tmp_path, "a window of 8 x 4 MiB, never answered") as attacked:
        with attacked.stranger() as stranger:
            send_a_window(stranger, 8)
        attacked.assert_unharmed()


def take_results_without_acknowledging(stranger, streams):
    """Sends the chunks of a job of one node, and reads the results, until the shard has had enough;
    returns how many results there were."""
    elems = MAX_CHUNK // 4
    settings = {"chunk_bytes": MAX_CHUNK, "window_chunks": 1}
    token = stranger.call("Join", wire_messages.join_request("kept", **settings)).token
    tensors = [{"name": "w", "shape": [streams * elems]}]
    layout = {"token": token, "dtype": 1, "wire": 1, "tensors": tensors}
    stranger.call("RegisterBucket", wire_messages.message("RegisterBucketRequest", **layout))
    opened = [stranger.stream() for _ in range(streams)]
    for number, stream in enumerate(opened):
        opening = {"token": token, "stream": number, "num_streams": streams, "incarnation": 1}
        stream.send(wire_messages.message("Frame", open=opening))
    for results in itertools.count():
        before, chunk = divmod(results, streams)
        sent = {"epoch": 1, "chunk": chunk, "round": before + 1, "wire": 1, "elems": elems}
        frame = wire_messages.message("Frame", chunk=sent | {"payload": bytes(MAX_CHUNK)})
        if not opened[chunk].send(frame) or not opened[chunk].receive():
            return results
    return 0


def test_results_that_are_never_acknowledged_are_kept_within_the_windows(tmp_path):
    attack = "results on 16 streams, read and never acknowledged"
    with scene(tmp_path, attack) as attacked:
        with attacked.stranger() as stranger:
            # One on each stream, which is the window.
            assert take_results_without_acknowledging(stranger, 16) == 16
        attacked.assert_unharmed()


def contradict(stranger):
    """Joins the job that everybody knows, each time with other terms."""
    claims = [(0, 2), (1, 2), (0, 3)]
    calls = [
        stranger.begin("Join", wire_messages.join_request(JOB, node=node, nodes=nodes))
        for node, nodes in claims
    ]
    calls[-1].exception()  # contradicts the stranger's own job


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
        contradict(stranger)
        for joined in [first, pool.submit(join, 1)]:
            joined.result(TIMEOUT).close()


def test_stranger_who_contradicts_a_job_without_a_secret_fails_it_with_a_reason_and_no_other(
    tmp_path,
):
    with scene(tmp_path, "a `Join` with the name of a job without a secret") as attacked:
        with servers() as cluster, attacked.stranger() as stranger:
            sidecar = cluster.add_sidecar(aggregators="").address
            stranger.begin("Join", wire_messages.join_request("open", node=1, nodes=3))
            stranger.call("Probe", b"")
            with pytest.raises((RuntimeError, OSError, ValueError), match="job 'open'"):
                session(sidecar, 0, [attacked.address], [-1], "", job="open", timeout=5).close()
        attacked.assert_unharmed()
