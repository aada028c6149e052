"""Contains jobs whose nodes host shards: `shard_jobs.py NAME OUT` runs a function of this file."""

import os
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

STEPS = 4


def exact() -> dict[str, Any]:
    """Trains with gradients whose mean is FACTOR * (step + 1), exactly in fp32.

    Returns the sum of the means over the steps, as every weight has it.
    """
    rank, world, factor = dist.get_rank(), dist.get_world_size(), float(os.environ["FACTOR"])
    model = torch.nn.Linear(50, 200, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    state = thalweg.ddp.attach(ddp, chunk_bytes=4096)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = factor * (step + 1) * (world if rank == 0 else 0)
        ddp(torch.full((1, 50), own)).sum().backward()
        optimizer.step()
    state.close()
    return {"sums": sorted({-float(w) for w in model.weight.flatten()}), "shards": state.shards}


def attached() -> dict[str, Any]:
    """Attaches to a module; returns the error."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    try:
        thalweg.ddp.attach(ddp)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


JOBS = {"exact": exact, "attached": attached}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
