"""Tests what the others get when a worker with a part of a sharded model is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from harness import Job, servers

JOBS = Path(__file__).parent / "fsdp_failure_jobs.py"


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        ("backward", 1),
        pytest.param("save", 0, marks=pytest.mark.long),
        pytest.param("forward", 1, marks=pytest.mark.long),
        pytest.param("gather", 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("nodes", [(2,), pytest.param((1, 1), marks=pytest.mark.long)])
def test_killed_worker_is_named_within_the_timeout_and_the_checkpoint_is_whole(
    stage, victim, nodes, tmp_path
):
    path = tmp_path / "saved" / "model.pt"
    with servers() as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in nodes]
        sockets = [
            sidecar.address
            for sidecar, count in zip(sidecars, nodes, strict=True)
            for _ in range(count)
        ]
        env = {"STAGE": stage, "CHECKPOINT": str(path)}
        job = Job("killed", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=JOBS)
        workers = job.wait()
    assert workers[victim].code == -signal.SIGKILL, job.output
    other = workers[1 - victim]
    assert other.code == 0, job.output
    error = other.result["error"]
    assert f"rank {victim}" in error or f"node {victim}" in error
    assert other.result["seconds"] < 20  # the process group's timeout
    assert "blocks.1.wide.weight" in torch.load(path)["model"]
