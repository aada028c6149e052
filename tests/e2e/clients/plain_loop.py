"""This module has the loop of scripts that use nothing but torch; see common.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Task, layers, seen
from torch.nn.parallel import DistributedDataParallel

Treatment = Callable[[torch.nn.Module], torch.nn.Module]


def unchanged(module: torch.nn.Module) -> torch.nn.Module:
    return module


def train(
    task: Task, inside: Treatment = unchanged, outside: Treatment = unchanged
) -> dict[str, Any]:
    """`inside` makes the module that is wrapped, and `outside` is for the wrapped one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = outside(DistributedDataParallel(inside(layers())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = 0
    if task.resumes:
        saved = torch.load(task.folder)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(task.steps):
        samples = torch.randn(2, 64, generator=generator)
        if step < done:
            continue
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    if task.saves and dist.get_rank() == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(parts | {"done": task.steps}, task.folder)
    return seen(model)
