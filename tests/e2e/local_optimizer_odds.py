"""Jobs of local_optimizer_jobs.py whose parameters or values are out of the ordinary."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thalweg.ps import LocalOptimizer


def hollow() -> dict[str, Any]:
    """Exchanges a weight in CODEC, beside parameters without elements that have a fragment, or a
    type, of their own; returns the weight and the job's counter of fragments.
    """
    weight, *empty = (nn.Parameter(each) for each in (torch.ones(64), torch.ones(0, 4)))
    empty.append(nn.Parameter(torch.ones(0, dtype=torch.bfloat16)))
    inner = torch.optim.SGD([*empty, weight], lr=0.5)
    options = {"every": 2, "fragments": 2, "outer": {"name": "nesterov", "lr": 1.0}}
    optimizer = LocalOptimizer(inner, codec=os.environ["CODEC"], **options)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        (weight - dist.get_rank()).square().div(2).sum().backward()
        optimizer.step()
        optimizer.finish()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        seen.append(sorted(set(weight.tolist())))
    return {"weights": seen, "exchanges": optimizer.stats()["exchanges"]}


def poisoned() -> dict[str, float]:
    """Exchanges two of 64 elements of which one is NaN on rank 0; returns how many are counted
    before and after it.
    """
    weight = nn.Parameter(torch.ones(64))
    inner = torch.optim.SGD([weight], lr=0.5)
    optimizer = LocalOptimizer(inner, every=1, codec="sparse:0.03125", outer={"name": "sgd"})
    counted = []
    for step in range(2):
        optimizer.zero_grad()
        weight.grad = torch.arange(64.0)
        if step == 1 and dist.get_rank() == 0:
            weight.grad[5] = float("nan")
        optimizer.step()
        counted.append(optimizer.stats()["nonfinite_elems"])
    return {"counted": counted, "arrived": int(weight.isnan().sum())}
