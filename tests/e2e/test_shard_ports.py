"""Tests where the shards of nodes listen, beside other programs and other jobs on the host."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import shard_jobs
from harness import Job, servers
from ports import free_port

JOBS = Path(shard_jobs.__file__)


def job(name, cluster, tmp_path, sidecar_of, **env):
    tmp_path.mkdir(exist_ok=True)
    return Job(name, cluster, tmp_path, sidecar_of=sidecar_of, env=env, jobs=JOBS)


def assert_exact(results, factor, shards):
    total = factor * sum(step + 1 for step in range(shard_jobs.STEPS))
    assert results == [{"sums": [total], "shards": shards}] * len(results)


@contextlib.contextmanager
def two_taken_ports() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Gives sockets that have two consecutive ports; once closed they are given to nobody else."""
    port = free_port(2)
    with (
        socket.create_server(("127.0.0.1", port)) as first,
        socket.create_server(("127.0.0.1", port + 1)) as second,
    ):
        yield first, second


def hosting(cluster):
    """The socket of a sidecar that is there already and can host shards."""
    return cluster.add_sidecar("--shard-listen", "127.0.0.1:0", aggregators="").address


@pytest.mark.parametrize("ports", ["{0}", "{0}-{1}"], ids=["one", "range"])
def test_ports_that_are_all_taken_are_named_to_all_workers(ports, tmp_path):
    with servers() as nothing, two_taken_ports() as taken:
        spec = ports.format(*(each.getsockname()[1] for each in taken))
        sidecars = ["", hosting(nothing)]
        workers = job("attached", nothing, tmp_path, sidecars, THALWEG_SHARD_PORTS=spec)
        errors = [result["error"] for result in workers.results()]
    assert errors[0].startswith(f"RuntimeError: thalweg: {socket.gethostname()}: ")
    assert errors[1].startswith(f"RuntimeError: thalweg: rank 0: {socket.gethostname()}: ")
    for error in errors:
        assert f"cannot listen on 127.0.0.1:{spec}" in error
        assert "taken" in error
        assert "THALWEG_SHARD_PORTS" in error


def test_free_port_of_a_range_is_found(tmp_path):
    with servers() as nothing, two_taken_ports() as (first, second):
        spec = f"{first.getsockname()[1]}-{second.getsockname()[1]}"
        second.close()
        sidecars = ["", hosting(nothing)]
        env = {"THALWEG_SHARD_PORTS": spec, "FACTOR": "1"}
        results = job("exact", nothing, tmp_path, sidecars, **env).results()
    assert_exact(results, 1.0, "2 shards, 2 of them in sidecars")


def test_two_jobs_side_by_side_are_exact_with_a_sidecar_of_their_own_and_one_in_common(tmp_path):
    with servers() as nothing:
        sidecars = ["", hosting(nothing)]
        factors = (3.0, 5.0)
        jobs = [
            job("exact", nothing, tmp_path / str(factor), sidecars, FACTOR=str(factor))
            for factor in factors
        ]
        for each, factor in zip(jobs, factors, strict=True):
            assert_exact(each.results(), factor, "2 shards, 2 of them in sidecars")


def test_nodes_that_disagree_about_local_shards_are_refused_with_both_settings(tmp_path):
    env_of = [{"THALWEG_LOCAL_SHARDS": value} for value in ("1", "0")]
    with servers() as nothing:
        sidecars = ["", hosting(nothing)]
        workers = Job("attached", nothing, tmp_path, sidecar_of=sidecars, env_of=env_of, jobs=JOBS)
        errors = [result["error"] for result in workers.results()]
    text = "local_shards is 1 on rank 0 but 0 on rank 1: it must be the same on all workers"
    assert errors == [f"ConfigError: thalweg: {text}"] * 2


def test_sidecars_that_can_host_shards_do_so_for_those_that_cannot(tmp_path):
    with servers() as nothing:
        idle = nothing.add_sidecar(aggregators="").address
        sidecars = [hosting(nothing), idle]
        results = job("exact", nothing, tmp_path, sidecars, FACTOR="1").results()
    assert_exact(results, 1.0, "1 shards, 1 of them in sidecars")
