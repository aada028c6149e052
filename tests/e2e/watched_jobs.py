"""Contains a job that steps when it is told to, for tests that watch it."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import job, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp


@job
def watched() -> dict[str, Any]:
    """Reads numbers of steps from the pipe $WATCHED_ORDERS; 0 ends. Answers on $WATCHED_DONE.

    Every bucket is compressed from the third step on.
    """
    torch.manual_seed(1)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    state = thalweg.ddp.attach(model, "powersgd:rank=2,start=2;elems<1000=fp16")
    with Path(os.environ["WATCHED_ORDERS"]).open() as orders:
        while steps := _agree(int(orders.readline()) if dist.get_rank() == 0 else 0):
            for _ in range(steps):
                model(torch.randn(4, 256)).square().mean().backward()
            dist.barrier()
            if dist.get_rank() == 0:
                Path(os.environ["WATCHED_DONE"]).write_text(f"{steps}\n", encoding="utf-8")
    stats = state.stats()
    state.close()
    return stats


def _agree(steps: int) -> int:
    """Returns the first worker's value on all workers."""
    told = torch.tensor(steps)
    dist.broadcast(told, 0)
    return int(told)


if __name__ == "__main__":
    main()
