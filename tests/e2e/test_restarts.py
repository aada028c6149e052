"""Tests that training goes on when an aggregator is killed and started again."""

from __future__ import annotations

import json
import re
import select
import time
from pathlib import Path

import pytest
import reconnecting_jobs
from harness import DEADLINE, Job, metric, servers

JOBS = Path(reconnecting_jobs.__file__)
KILLS = 4


def rounds_of(cluster, aggregator):
    """The rounds that the aggregator has completed since it was started."""
    jobs = json.loads(cluster.page(aggregator, "/api/v1/jobs"))["jobs"]
    return sum(job["rounds"] for job in jobs)


def await_rounds(cluster, aggregator, job):
    while rounds_of(cluster, aggregator) == 0:
        assert job.workers[0].process.poll() is None, job.output
        select.select([], [], [], 0.005)


def kill(cluster, number):
    aggregator = cluster.aggregators.pop(number)
    aggregator.process.kill()
    aggregator.process.wait()
    return aggregator.address


def train(cluster, tmp_path, codec, env=None):
    tmp_path.mkdir()
    sidecars = [cluster.add_sidecar(env=env).address for _ in range(2)]
    return Job("train", cluster, tmp_path, sidecar_of=sidecars, env={"CODEC": codec}, jobs=JOBS)


@pytest.mark.parametrize("codec", ["fp32", "onebit", "powersgd:rank=2,start=2"])
def test_killed_aggregators_that_come_back_end_no_job(codec, tmp_path):
    pauses = []
    with servers(shards=2) as cluster:
        expected = train(cluster, tmp_path / "undisturbed", codec).results()
        addresses = [aggregator.address for aggregator in cluster.aggregators]
        job = train(cluster, tmp_path / "restarted", codec)
        for _ in range(KILLS):
            assert [aggregator.address for aggregator in cluster.aggregators] == addresses
            await_rounds(cluster, cluster.aggregators[0], job)
            began = time.monotonic()
            addresses.append(addresses.pop(0))  # the next kill is of the other one
            cluster.add_aggregator(listen=kill(cluster, 0))
            await_rounds(cluster, cluster.aggregators[-1], job)
            pauses.append(time.monotonic() - began)
        results = job.results(DEADLINE)
        returns = [
            metric(sidecar, "thalweg_sidecar_shard_returns_total")
            for sidecar in cluster.sidecars[2:]
        ]
        lost = sum(
            metric(aggregator, "thalweg_shard_lost_residuals_total")
            for aggregator in cluster.aggregators
        )
    print(f"{codec}: from the kill to the first round after it: {max(pauses):.2f} s at most")
    assert returns == [KILLS, KILLS]
    assert len(set(results)) == 1
    assert (lost > 0) == (codec == "onebit")  # only shards with residuals lose something
    if codec != "onebit":
        assert results == expected
    assert not re.search("error", job.output, re.I)


def test_aggregator_that_does_not_come_back_is_named(tmp_path):
    with servers(shards=2) as cluster:
        job = train(cluster, tmp_path / "job", "fp32", env={"THALWEG_RECONNECT": "1"})
        await_rounds(cluster, cluster.aggregators[1], job)
        address = kill(cluster, 1)
        for worker in job.wait():
            assert worker.code != 0
        reason = rf"lost the connection to aggregator shard 1 at {address}: .*within 1 s"
        assert re.search(reason, job.output), job.output
