"""Tests that external failures are reported to every worker, in words, within the deadline."""

from __future__ import annotations

import concurrent.futures
import random
import re
import socket
import struct
import time

import pytest
import torch  # noqa: F401 - its libraries must be loaded before the extension
from harness import TIMEOUT, Job, servers
from ports import free_port

from thalweg import _C

PATIENCE = 20.0  # of workers that wait for what does not come
LONG = 30.0  # of workers that must hear at once what is wrong, and say so if they wait instead
AT_ONCE = 15.0  # on a busy machine


def connect(sidecar, rank, *, world_size=2, job, timeout=PATIENCE, **changes):
    """Connects one worker of a job on one node; returns an exception or its status."""
    arguments = {
        "node": 0,
        "num_nodes": 1,
        "node_name": "here",
        "local_rank": rank,
        "local_size": world_size,
        "codec": "fp32",
        "chunk_bytes": 4096,
    } | changes
    try:
        session = _C.Session(
            sidecar_path=sidecar,
            job=job,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            **arguments,
        )
    except (ValueError, RuntimeError, OSError) as error:
        return error
    session.close()
    return None


def together(*calls):
    """Makes the calls at the same time, as workers do; returns the results and the seconds."""
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        results = [future.result() for future in [pool.submit(call) for call in calls]]
    return results, time.monotonic() - start


@pytest.fixture(scope="module")
def cluster():
    with servers(nodes=1, shards=1) as running:
        yield running


@pytest.fixture
def job(request):
    return request.node.name


@pytest.fixture
def sidecar(cluster, job):
    """Yields a sidecar and checks that it still works afterwards."""
    path = cluster.sidecars[0].address
    yield path
    healthy = [
        lambda rank=rank: connect(path, rank, job=f"{job} after", timeout=TIMEOUT)
        for rank in (0, 1)
    ]
    assert together(*healthy)[0] == [None, None]


def test_workers_that_announce_different_world_sizes_are_refused(sidecar, job):
    (first, second), seconds = together(
        lambda: connect(sidecar, 0, world_size=2, job=job, timeout=LONG),
        lambda: connect(sidecar, 1, world_size=3, local_size=2, job=job, timeout=LONG),
    )
    assert seconds < AT_ONCE
    errors = f"{first} {second}"
    assert "world" in errors
    assert "2" in errors
    assert "3" in errors
    assert isinstance(first, Exception)
    assert isinstance(second, Exception)


def test_second_worker_with_the_same_rank_is_refused(sidecar, job):
    results, seconds = together(
        lambda: connect(sidecar, 0, job=job), lambda: connect(sidecar, 0, job=job)
    )
    assert seconds < PATIENCE + AT_ONCE
    assert all(isinstance(result, Exception) for result in results)
    assert any("rank 0" in str(result) for result in results)


def test_worker_that_does_not_come_is_named(sidecar, job):
    error = connect(sidecar, 0, job=job)
    assert isinstance(error, TimeoutError)
    assert "only 1 of the 2 workers" in str(error)


def test_different_codecs_are_refused(sidecar, job):
    results, _ = together(
        lambda: connect(sidecar, 0, codec="fp16", job=job, timeout=LONG),
        lambda: connect(sidecar, 1, codec="fp32", job=job, timeout=LONG),
    )
    assert all(isinstance(result, Exception) for result in results)
    assert any("fp16" in str(result) and "fp32" in str(result) for result in results)


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "fp64"},
        {"codec": "zip"},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 40},
        {"local_size": 0},
        {"local_rank": 7},
        {"num_nodes": 0},
        {"node": 5},
        {"world_size": 0},
        {"job": ""},
        {"timeout": 0.0},
    ],
)
def test_impossible_settings_are_refused_at_once(sidecar, changes, job):
    start = time.monotonic()
    error = connect(sidecar, **({"rank": 0, "job": job, "timeout": LONG} | changes))
    assert isinstance(error, Exception)
    # A worker without any time may be through before it has heard the refusal.
    assert "timeout" in changes or not isinstance(error, TimeoutError)
    assert time.monotonic() - start < AT_ONCE


def test_sidecar_that_is_not_there_is_named(tmp_path, job):
    error = connect(str(tmp_path / "none.sock"), 0, job=job)
    assert isinstance(error, ConnectionError)
    assert "none.sock" in str(error)


def test_stale_socket_is_named(tmp_path, job):
    path = str(tmp_path / "stale.sock")
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(path)
    error = connect(path, 0, job=job)
    assert isinstance(error, ConnectionError)
    assert "stale.sock" in str(error)


def test_stale_socket_is_replaced_by_a_new_sidecar(job):
    with servers() as nothing:
        with socket.socket(socket.AF_UNIX) as abandoned:
            abandoned.bind(str(nothing.folder / "s0.sock"))
        sidecar = nothing.add_sidecar(aggregators="")
        assert connect(sidecar.address, 0, world_size=1, job=job) is None


def test_aggregator_that_is_not_there_is_named_to_all_workers(job):
    with servers() as nothing:
        address = f"127.0.0.1:{free_port()}"
        path = nothing.add_sidecar(aggregators=address).address
        results, seconds = together(
            lambda: connect(path, 0, job=job), lambda: connect(path, 1, job=job)
        )
    assert seconds < PATIENCE + AT_ONCE
    for error in results:
        assert isinstance(error, ConnectionError | TimeoutError)
        assert address in str(error)


def frames():
    """Yields byte strings that are not a valid first frame."""
    rng = random.Random(1)
    hello_of_another_version = struct.pack("<4sHHI", b"THW1", 1, 0, 4) + struct.pack("<I", 99)
    yield "random bytes", rng.randbytes(1000)
    yield "too long", struct.pack("<4sHHI", b"THW1", 1, 0, 1 << 31)
    yield "cut header", b"THW1\1"
    yield "cut body", struct.pack("<4sHHI", b"THW1", 1, 0, 100) + b"abc"
    yield "unknown type", struct.pack("<4sHHI", b"THW1", 77, 0, 0)
    yield "wrong version", hello_of_another_version
    yield "another protocol", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(("name", "data"), list(frames()), ids=lambda value: str(value)[:16])
def test_malformed_frame_ends_its_connection_only(sidecar, name, data, job):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(sidecar)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        try:
            while client.recv(4096):  # the reason if there is one, then the end
                pass
        except ConnectionResetError:
            pass


def frame(type_, body):
    return struct.pack("<4sHHI", b"THW1", type_, 0, len(body)) + body


def text(value):
    return struct.pack("<I", len(value)) + value.encode()


@pytest.mark.parametrize(("name", "type_"), [("Hello", 1), ("HostShard", 12)])
def test_worker_of_another_version_is_told_both_versions(sidecar, name, type_):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(sidecar)
        client.sendall(frame(type_, struct.pack("<I", 6) + b"fields of another version"))
        answer = b"".join(iter(lambda: client.recv(4096), b"")).decode(errors="replace")
    assert re.search(rf"{name}: worker speaks ipc version 6, this sidecar \d+; install the", answer)


def test_sidecar_of_an_older_version_is_named_with_what_may_be_wrong(tmp_path, job):
    def refuse():
        with listening.accept()[0] as worker:
            worker.recv(4096)
            invalid_argument = struct.pack("<I", 3)
            worker.sendall(frame(7, invalid_argument + text("frame of type 12, expected 1 to 11")))

    path = str(tmp_path / "old.sock")
    with (
        socket.socket(socket.AF_UNIX) as listening,
        concurrent.futures.ThreadPoolExecutor(1) as old,
    ):
        listening.settimeout(TIMEOUT)
        listening.bind(path)
        listening.listen()
        refused = old.submit(refuse)
        with pytest.raises((RuntimeError, ValueError)) as error:
            _C.ShardOffer(sidecar_path=path, job=job, secret="5e" * 32, timeout=TIMEOUT)
        refused.result(TIMEOUT)
    assert f"the sidecar at {path} refuses to host a shard: frame of type 12" in str(error.value)
    assert "is its Thalweg version that of the worker?" in str(error.value)


def test_random_bytes_do_not_harm_an_aggregator(cluster, sidecar):
    host, port = cluster.aggregators[0].address.rsplit(":", 1)
    rng = random.Random(2)
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as client:
            client.sendall(rng.randbytes(500))


def test_worker_killed_midway_is_named_on_all_nodes(tmp_path):
    with servers(nodes=2, shards=1) as running:
        sockets = [server.address for server in running.sidecars]
        workers = Job("killed_midway", running, tmp_path, sidecar_of=sockets).wait()
        assert workers[1].code == -9
        assert workers[0].code == 0, workers[0].output
        error = workers[0].result["error"]
    assert error.startswith("thalweg: ")
    assert "rank 1" in error or "node 1" in error


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    with servers() as nothing:
        folder = tmp_path_factory.mktemp("refused")
        env = {"THALWEG_SIDECAR_PATH": "x"}
        job = Job("refused", nothing, folder, sidecar_of=["/nonexistent/x.sock"] * 2, env=env)
        results = job.results()
        assert "unknown environment variable THALWEG_SIDECAR_PATH is ignored" in job.output
        yield results


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "order",
            "ValueError: thalweg: the models differ at parameter 0: left.weight float32[4, 4] "
            "on rank 0, right.weight float32[4, 4] on rank 1",
        ),
        (
            "codec",
            "ConfigError: thalweg: codec is fp32 on rank 0 but fp16 on rank 1: "
            "it must be the same on all workers",
        ),
        (
            "bad codec on one",
            "ConfigError: thalweg: rank 1: codec is 'zip', expected one of fp32, fp16, bf16, "
            "powersgd, int8, onebit, topk, auto",
        ),
        (
            "hook",
            "ConfigError: thalweg: rank 0: the module has another communication hook: "
            "attach() must be the only one",
        ),
        (
            "complex",
            "ConfigError: thalweg: rank 0: weight is torch.complex64, expected one of "
            "torch.float32, torch.float16, torch.bfloat16, torch.float64",
        ),
        (
            "module",
            "TypeError: thalweg: attach() got a Linear, expected the model in "
            "torch.nn.parallel.DistributedDataParallel, after init_process_group()",
        ),
    ],
)
def test_attach_refuses_with_the_same_words_on_all_workers(refused, case, expected):
    assert [result[case] for result in refused] == [expected] * 2


def test_attach_names_a_sidecar_that_is_not_there_on_all_workers(refused):
    for result in refused:
        assert result["sidecar"].startswith("ConnectionError: thalweg: ")
        assert "/nonexistent/x.sock" in result["sidecar"]


def test_backward_refuses_sparse_gradients_and_closed_sessions(tmp_path):
    with servers(nodes=1, shards=1) as running:
        path = running.sidecars[0].address
        results = Job("sparse", running, tmp_path, sidecar_of=[path] * 2).results()
    for result in results:
        assert result["sparse"].startswith("RuntimeError: thalweg: gradient bucket 0 is sparse")
        assert "attached to this module already" in result["twice"]
        assert result["closed"].startswith("RuntimeError: thalweg: ")
        assert "closed" in result["closed"]
