"""Runs jobs on nodes of several workers each, with shards of aggregators or in the sidecars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import DEADLINE, Job, servers


def run(
    jobs: Path, name: str, folder: Path, nodes: tuple[int, ...], shards: int = 0, **how: Any
) -> list[Any]:
    """Returns what the workers of such a job return."""
    return outputs(jobs, name, folder, nodes, shards, **how)[0]


def outputs(
    jobs: Path,
    name: str,
    folder: Path,
    nodes: tuple[int, ...],
    shards: int = 0,
    *,
    seconds: float = DEADLINE,
    **env: str,
) -> tuple[list[Any], str]:
    """Returns the same, and what the workers print, within so many seconds. `nodes` has the number
    of workers of each, and `shards` is the number of aggregators; without any, sidecars host them.

    The workers know NODES, FOLDER and SIDECAR_HTTP, the port of their sidecar's metrics.
    """
    with servers(shards=shards) as cluster:
        flags = () if shards else ("--shard-listen", "127.0.0.1:0")
        sidecars = [cluster.add_sidecar(*flags) for _ in nodes]
        of_workers = [
            sidecar for sidecar, count in zip(sidecars, nodes, strict=True) for _ in range(count)
        ]
        job = Job(
            name,
            cluster,
            folder,
            sidecar_of=[sidecar.address for sidecar in of_workers],
            env={"NODES": str(len(nodes)), "FOLDER": str(folder)} | env,
            env_of=[{"SIDECAR_HTTP": sidecar.http} for sidecar in of_workers],
            jobs=jobs,
        )
        return job.results(seconds), job.output
