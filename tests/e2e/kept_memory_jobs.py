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


def kept(_: str) -> list[tuple[int, ...]]:
    """Trains two million weights; returns, by node, what METRICS then say."""
    layer = nn.Linear(2000, 1000, bias=False)
    optimizer = ServerOptimizer(layer.parameters(), "adamw", codec="bf16", pull="bf16")
    for _step in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2000)).sum().backward()
        optimizer.step()
    dist.barrier()
    found = []
    for address in os.environ["SIDECARS_HTTP"].split(","):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            page = reply.read().decode()
        found.append(tuple(int(metric_in(page, name)) for name in METRICS))
    dist.barrier()
    return found


if __name__ == "__main__":
    job_runner.run(kept, "gloo")
