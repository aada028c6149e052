"""Tests that training does not notice connections that break and come back."""

from __future__ import annotations

import json
import re
import select
from pathlib import Path

import pytest
import reconnecting_jobs
from breaking_proxy import proxy
from harness import DEADLINE, Job, metric, servers

JOBS = Path(reconnecting_jobs.__file__)
RESETS = 25  # of the two nodes' connections together, at least


def rounds_of(cluster):
    """The rounds that the aggregator has completed."""
    jobs = json.loads(cluster.page(cluster.aggregators[0], "/api/v1/jobs"))["jobs"]
    return sum(job["rounds"] for job in jobs)


def train(cluster, tmp_path, codec, aggregator):
    tmp_path.mkdir()
    sidecars = [cluster.add_sidecar(aggregators=aggregator).address for _ in range(2)]
    return Job("train", cluster, tmp_path, sidecar_of=sidecars, env={"CODEC": codec}, jobs=JOBS)


@pytest.mark.parametrize("codec", ["fp32", "onebit", "powersgd:rank=2,start=2"])
def test_resets_during_training_change_no_bit(codec, tmp_path):
    with servers(shards=1) as cluster:
        direct = cluster.aggregators[0].address
        expected = train(cluster, tmp_path / "direct", codec, direct).results()
        with proxy(direct) as between:
            job = train(cluster, tmp_path / "proxy", codec, between.address)
            while job.workers[0].process.poll() is None and rounds_of(cluster) == 0:
                select.select([], [], [], 0.01)
            while job.workers[0].process.poll() is None:
                between.reset()
                select.select([], [], [], 0.03)
            results = job.results(DEADLINE)
            resets = between.resets
        resumed = sum(
            metric(sidecar, "thalweg_grpc_resumed_streams_total", 'role="client"')
            for sidecar in cluster.sidecars[2:]
        )
    assert results == expected
    assert len(set(results)) == 1
    assert resets >= RESETS
    assert resumed >= RESETS / 2  # each connection has one stream; some break again before
    assert not re.search("error", job.output, re.I)
