"""Tests gradients on a GPU, and the same jobs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Job, servers

JOBS = Path(__file__).parent / "gpu_jobs.py"
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
PATHS = {"cpu": {"cpu"}, "cuda:0": {"ipc", "pinned", "pageable"}}


def run(name: str, device: str, tmp_path: Path, nodes: int) -> list[dict]:
    """Runs two workers on one device, on one node or on two."""
    variables = {"GPU_JOB_DEVICE": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with servers(nodes=nodes, shards=1) as cluster:
        sockets = [cluster.sidecars[rank * nodes // 2].address for rank in range(2)]
        job = Job(name, cluster, tmp_path, sidecar_of=sockets, env=variables, jobs=JOBS)
        return job.results()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_bit_for_bit_the_mean_of_the_workers(device, nodes, tmp_path):
    for result in run("exact_means", device, tmp_path, nodes):
        print(result)
        assert result["differing"] == 0
        assert result.get("differing on a side stream", 0) == 0
        assert result["path"] in PATHS[device]
        assert f"path: {result['path']}" in result["summary"]
        assert result["status"] is None


@pytest.mark.parametrize("device", DEVICES)
def test_closed_session_fails_backward_with_its_reason(device, tmp_path):
    for result in run("closed_early", device, tmp_path, 1):
        assert "the session was closed" in result["error"]


@pytest.mark.parametrize("device", DEVICES)
def test_server_optimizer_gives_the_weights_of_the_fused_one(device, tmp_path):
    for result in run("served_weights", device, tmp_path, 2):
        assert result == {"differing": 0, "same_moments": True}
