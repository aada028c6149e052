"""Runs jobs that leave a history: traces of the shards, and records of what workers push and get.

history.py reads both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from harness import Job, Servers, servers


@contextlib.contextmanager
def traced(tmp_path: Path, shards: int, hosts: int = 0) -> Iterator[Servers]:
    """A cluster whose shards write traces. `hosts`: so many nodes are there, and each hosts one."""
    with servers(shards=0) as cluster:
        traces = tmp_path / "traces"
        traces.mkdir()
        cluster.env = {"THALWEG_TRACE": str(traces)}
        for _ in range(shards):
            cluster.add_aggregator()
        for _ in range(hosts):
            cluster.add_sidecar("--shard-listen", "127.0.0.1:0")
        cluster.env = {}
        yield cluster


def start(jobs: Path, cluster: Servers, tmp_path: Path, name: str, world: int, **env: str) -> Job:
    """Starts a job of that file with one worker on each node, which keep records."""
    records = tmp_path / "records"
    records.mkdir()
    while len(cluster.sidecars) < world:
        cluster.add_sidecar()
    sidecars = [each.address for each in cluster.sidecars]
    env = {"RECORDS": str(records), "THALWEG_STEP_TIMEOUT": "60"} | env
    return Job(name, cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=jobs)
