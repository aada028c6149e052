"""Contains jobs whose scripts change by hand what shards keep: `hand_changes_jobs.py NAME OUT`."""

import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from torch import nn

from thalweg.ps import ServerOptimizer


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(100 * step + dist.get_rank())
    found: torch.Tensor = model(torch.randn(8, 64, generator=data)).square().mean()
    return found


def published_data() -> dict[str, bool]:
    """Changes one weight through `data`, after a step that is left out; PULL says how weights come.
    Returns whether the float32 weights then are this one, and the others as they were.
    """
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = ServerOptimizer(
        model.named_parameters(), "sgd", lr=0.1, pull=os.environ["PULL"], loss_scaling=True
    )
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, step) * (float("inf") if step == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    before = optimizer.full_state_dict()
    dist.barrier()
    model[0].weight.data.clamp_(-0.0625, 0.0625)
    optimizer.publish()
    after, found = optimizer.full_state_dict(), model[0].weight.detach()
    others = [name for name in before if name != "0.weight"]
    return {
        "published": torch.equal(after["0.weight"], found) and float(found.max()) == 0.0625,
        "others stay": all(torch.equal(before[name], after[name]) for name in others),
    }


JOBS: dict[str, Callable[[], Any]] = {job.__name__: job for job in (published_data,)}


if __name__ == "__main__":
    job_runner.run(lambda name: JOBS[name]())
