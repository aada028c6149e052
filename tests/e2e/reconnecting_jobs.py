"""Contains a training: `reconnecting_jobs.py train OUT` writes a digest of its weights."""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

STEPS = 150


def train() -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32), torch.nn.Linear(32, 8)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = thalweg.ddp.attach(ddp, codec=os.environ["CODEC"], chunk_bytes=4096)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, generator=random)).square().mean().backward()
        optimizer.step()
    state.close()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main() -> None:
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"train": train}[name]()
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    gc.collect()  # see jobs.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
