"""Contains jobs whose workers say what servers keep for them: `kept_memory_jobs.py NAME OUT`."""

import os
import urllib.request

import job_runner
import torch
import torch.distributed as dist
from harness import metric_in
from torch import nn

from thalweg.ps import ServerOptimizer

METRICS = ("thalweg_shard_residual_bytes", "thalweg_sidecar_kept_result_bytes")
SHARE = "thalweg_sidecar_shard_share"


def kept(_: str) -> list[tuple[float, ...]]:
    """Trains two million weights; returns by node what METRICS then say, and its SHARE."""
    layer = nn.Linear(2000, 1000, bias=False)
    optimizer = ServerOptimizer(layer.parameters(), "adamw", codec="bf16", pull="bf16")
    for _step in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2000)).sum().backward()
        optimizer.step()
    dist.barrier()
    found = []
    for node, address in enumerate(os.environ["SIDECARS_HTTP"].split(",")):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            page = reply.read().decode()
        share = metric_in(page, SHARE, f'shard="{node}"')
        found.append((*(metric_in(page, name) for name in METRICS), share))
    dist.barrier()
    return found


if __name__ == "__main__":
    job_runner.run(kept, "gloo")
