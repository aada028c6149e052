"""Contains trainings: `reconnecting_jobs.py NAME OUT` writes how many steps one has done, and a
digest of its weights. They do STEPS steps, or go on until there is a file UNTIL.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg.examples import fashion_mnist

STEPS = int(os.environ.get("STEPS", "150"))


def steps() -> Iterator[None]:
    """Counts the steps, the same on all workers."""
    until = os.environ.get("UNTIL")
    if until is None:
        yield from [None] * STEPS
        return
    is_over = torch.zeros(1)
    while not is_over:
        yield
        is_over.fill_(Path(until).exists())
        dist.broadcast(is_over, 0)


def train() -> tuple[int, str]:
    """WIDE: buckets have many more chunks than windows. CHUNK: bytes of one."""
    torch.manual_seed(0)
    wide, chunk = int(os.environ.get("WIDE", "1")), int(os.environ.get("CHUNK", "4096"))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128 * wide),
        torch.nn.Tanh(),
        torch.nn.Linear(128 * wide, 32 * wide),
        torch.nn.Linear(32 * wide, 8),
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02 * wide**2)
    state = thalweg.ddp.attach(ddp, codec=os.environ["CODEC"], chunk_bytes=chunk)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())
    done = 0
    for _ in steps():
        done += 1
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, generator=random)).square().mean().backward()
        optimizer.step()
    state.close()
    return done, digest(model)


def train_fashion() -> None:
    """Trains as the demo does; the example itself writes its history."""
    arguments = ["--epochs", "1", "--codec", os.environ["CODEC"]]
    sys.exit(fashion_mnist.main([*arguments, "--out", sys.argv[2]]))


def main() -> None:
    if sys.argv[1] == "fashion":
        train_fashion()
    job_runner.run(lambda _: train())


if __name__ == "__main__":
    main()
