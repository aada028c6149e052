"""Trains with arithmetic that is exact in fp32, as a script that does not mention Thalweg.

Every rank prints one line of JSON: its rank and the sum and digest of the weights.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

INPUTS, OUTPUTS, STEPS, RATE = 64, 1024, 5, 2.0**-10


def gradient(rank: int, world: int, step: int) -> float:
    """The gradient of every weight; its mean over the ranks has no rounding."""
    return float(world * (rank + step + 1))


def expected_weight(world: int) -> float:
    """The value of every weight after training."""
    total = sum(gradient(rank, world, step) for step in range(STEPS) for rank in range(world))
    return -RATE * total / world


def main(after_step: Callable[[int, int], None] = lambda rank, step: None) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.full((1, INPUTS), gradient(rank, world, step))).sum().backward()
        optimizer.step()
        after_step(rank, step)
    weights = model.weight.detach().numpy()
    digest = hashlib.sha256(weights.tobytes()).hexdigest()
    values = sorted({float(value) for value in weights.ravel()})
    print(json.dumps({"rank": rank, "values": values, "digest": digest}), flush=True)
    del model, ddp, optimizer
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
