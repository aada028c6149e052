"""Tests that training does not notice connections that break and come back."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import reconnecting_jobs
from breaking_proxy import proxy
from harness import DEADLINE, Job, metric, servers
from waiting import until

JOBS = Path(reconnecting_jobs.__file__)


def goes_on(cluster, job, count):
    """Waits for `count` more rounds of the aggregator; returns False if the job ends before."""
    last = cluster.rounds() + count
    until(
        f"{count} more rounds, or the end",
        lambda: cluster.rounds() >= last or job.has_ended(),
        DEADLINE,
        lambda: job.output,
        every=0.002,
    )
    return not job.has_ended()


def train(cluster, tmp_path, codec, steps, aggregator):
    tmp_path.mkdir()
    sidecars = [cluster.add_sidecar(aggregators=aggregator).address for _ in range(2)]
    variables = {"CODEC": codec, "STEPS": str(steps)}
    return Job("train", cluster, tmp_path, sidecar_of=sidecars, env=variables, jobs=JOBS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("codec", "resets", "steps"),
    [
        ("fp32", 25, 600),
        ("onebit", 25, 600),
        ("powersgd:rank=2,start=2", 25, 600),
        pytest.param("fp32", 1000, 20_000, marks=pytest.mark.long),
    ],
)
def test_resets_during_training_change_no_bit(codec, resets, steps, tmp_path):
    """`resets` is the number of both nodes' connections together, at least."""
    patience = DEADLINE + steps / 20
    rng = random.Random(resets)
    with servers(shards=1) as cluster:
        direct = cluster.aggregators[0].address
        began = time.monotonic()
        expected = train(cluster, tmp_path / "direct", codec, steps, direct).results(patience)
        undisturbed = time.monotonic() - began
        with proxy(direct) as between:
            began = time.monotonic()
            job = train(cluster, tmp_path / "proxy", codec, steps, between.address)
            while between.resets < resets and goes_on(cluster, job, rng.randint(1, 30)):
                between.reset()
            results = job.results(patience)
            disturbed = time.monotonic() - began
            done = between.resets
        resumed = sum(
            metric(sidecar, "thalweg_grpc_resumed_streams_total", 'role="client"')
            for sidecar in cluster.sidecars[2:]
        )
    print(f"{codec}: {done} resets: {disturbed:.1f} s, without {undisturbed:.1f} s")
    assert results == expected
    assert all(result == results[0] for result in results)
    assert done >= resets
    assert resumed >= resets / 2  # each connection has one stream; some break again before
    assert not re.search("error", job.output, re.I)
