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

JOBS = Path(reconnecting_jobs.__file__)


def train(cluster, folder, codec, aggregator, steps=None):
    """Starts a job; without `steps` it goes on until there is a file `over` in `folder`."""
    folder.mkdir()
    sidecars = [cluster.add_sidecar(aggregators=aggregator).address for _ in range(2)]
    end = {"UNTIL": str(folder / "over")} if steps is None else {"STEPS": str(steps)}
    variables = {"CODEC": codec, **end}
    return Job("train", cluster, folder, sidecar_of=sidecars, env=variables, jobs=JOBS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("codec", "resets"),
    [
        ("fp32", 25),
        ("onebit", 25),
        ("powersgd:rank=2,start=2", 25),
        pytest.param("fp32", 1000, marks=pytest.mark.long),
    ],
)
def test_resets_during_training_change_no_bit(codec, resets, tmp_path):
    """`resets` is the number of both nodes' connections together, at least."""
    rng = random.Random(resets)
    with servers(shards=1) as cluster:
        direct = cluster.aggregators[0].address
        with proxy(direct) as between:
            began = time.monotonic()
            job = train(cluster, tmp_path / "proxy", codec, between.address)
            between.reset_often(job, resets, lambda: rng.randint(1, 30))
            (tmp_path / "proxy" / "over").touch()
            results = job.results()
            disturbed = time.monotonic() - began
            done = between.resets
        resumed = sum(
            metric(sidecar, "thalweg_grpc_resumed_streams_total", 'role="client"')
            for sidecar in cluster.sidecars
        )
        steps = results[0][0]
        began = time.monotonic()
        undisturbed = train(cluster, tmp_path / "direct", codec, direct, steps)
        expected = undisturbed.results(DEADLINE + steps / 20)
    print(f"{codec}: {done} resets: {disturbed:.1f} s, then {time.monotonic() - began:.1f} s")
    assert results == expected
    assert all(result == results[0] for result in results)
    assert resumed >= resets / 2  # each connection has one stream; some break again before
    assert not re.search("error", job.output, re.I)
