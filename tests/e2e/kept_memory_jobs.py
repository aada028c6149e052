"""Contains jobs whose workers say what servers keep for them: `kept_memory_jobs.py NAME OUT`."""

import json
import os
import urllib.request

import job_runner
import torch
import torch.distributed as dist
from harness import metric_in
from torch import nn

from thalweg.ps import ServerOptimizer

METRICS = ("thalweg_shard_residual_bytes", "thalweg_sidecar_kept_result_bytes")


def page_of(http: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{http}{path}", timeout=10) as reply:
        return str(reply.read().decode())


def kept(_: str) -> list[tuple[float, ...]]:
    """Trains two million weights; returns, by node, its shard's share of 1 and what METRICS then
    say.
    """
    layer = nn.Linear(2000, 1000, bias=False)
    optimizer = ServerOptimizer(layer.parameters(), "adamw", codec="bf16", pull="bf16")
    for _step in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2000)).sum().backward()
        optimizer.step()
    dist.barrier()
    nodes = os.environ["SIDECARS_HTTP"].split(",")
    jobs = [json.loads(page_of(node, "/api/v1/jobs"))["jobs"] for node in nodes]
    (shares,) = [job["placement"]["shares"] for [job] in jobs if job["placement"]]
    pages = [page_of(node, "/metrics") for node in nodes]
    dist.barrier()
    return [
        (share, *(metric_in(page, name) for name in METRICS))
        for share, page in zip(shares, pages, strict=True)
    ]


if __name__ == "__main__":
    job_runner.run(kept)
