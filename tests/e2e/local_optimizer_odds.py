"""Jobs of local_optimizer_jobs.py whose parameters or values are out of the ordinary."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from local_optimizer_trainers import one_weight
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


def mixed() -> dict[str, Any]:
    """Exchanges a weight of which each worker keeps a half, and ends right then, twice; returns it
    after each, and what the shards have.
    """
    outer = {"name": "nesterov", "lr": 1.0, "momentum": 0.5}
    weight, optimizer, step = one_weight(2, 0.5, dist.get_rank(), outer=outer, mix=0.5)
    seen = [step() for _ in range(2)][-1:]
    for _ in range(2):
        optimizer.finish()
        seen.append(weight.item())
    whole = next(iter(optimizer.full_state_dict().values())).item()
    return {"seen": seen, "whole": whole, "exchanges": optimizer.stats()["exchanges"]}


def replanned() -> list[float]:
    """Goes on from a state whose weights are on their way, with a plan by which they leave again
    before they are due, in a step that changes nothing; returns what a worker and the shards have.
    """
    outer = {"name": "sgd"}
    weight, optimizer, step = one_weight(4, 0.5, dist.get_rank(), outer=outer, delay=3)
    for _ in range(5):
        step()
    state, value = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    optimizer.close()
    weight, optimizer, step = one_weight(2, 0.5, dist.get_rank(), outer=outer)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        weight.copy_(value)
    optimizer.param_groups[0]["lr"] = 0.0
    return [step(), next(iter(optimizer.full_state_dict().values())).item()]


def poisoned() -> dict[str, float]:
    """Exchanges some of 2 x 32 elements, of which one is NaN on rank 0 in the second exchange, in
    CODEC; returns how many are counted before and after it, and how many there are on rank 1.
    """
    weight = nn.Parameter(torch.ones(2, 32))
    inner = torch.optim.SGD([weight], lr=0.5)
    optimizer = LocalOptimizer(inner, every=1, codec=os.environ["CODEC"], outer={"name": "sgd"})
    counted = []
    for step in range(2):
        optimizer.zero_grad()
        weight.grad = torch.arange(64.0).view(2, 32)
        if step == 1 and dist.get_rank() == 0:
            weight.grad[1, 5] = float("nan")
        optimizer.step()
        counted.append(optimizer.stats()["nonfinite_elems"])
    found = [int(weight.isnan().sum())]
    dist.broadcast_object_list(found, 1)
    return {"counted": counted, "arrived": found[0]}
