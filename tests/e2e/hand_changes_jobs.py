"""Contains jobs whose scripts change by hand what shards keep: `hand_changes_jobs.py NAME OUT`."""

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from jobs import outcome
from torch import nn

from thalweg.ps import LocalOptimizer, ServerOptimizer

STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """Returns the loss of a rank's batch, its own if None."""
    data = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    found: torch.Tensor = model(torch.randn(8, 64, generator=data)).square().mean()
    return found


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    """Returns by how much their parameters differ, read without waiting for anything."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


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


def left_with_the_last_step() -> list[float]:
    """Lets the optimizer go in the way that HOW says, right after a step that does not wait for its
    weights. Returns how far these are from torch's, and from those of the step before.
    """
    model, torchs, before = make_model(), make_model(), make_model()
    torch_optimizer = torch.optim.SGD(torchs.parameters(), lr=0.1)
    _train_alone(model, close=os.environ["HOW"] == "close")
    for step in range(STEPS):
        before.load_state_dict(torchs.state_dict())
        torch_optimizer.zero_grad()
        for rank in range(2):
            (loss(torchs, step, rank) / 2).backward()
        torch_optimizer.step()
    gc.collect()
    return [distance(model, torchs), distance(model, before)]


def _train_alone(model: nn.Module, *, close: bool) -> None:
    optimizer = ServerOptimizer(model.named_parameters(), "sgd", lr=0.1, overlap=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    if close:
        optimizer.close()


def closed_over_a_change() -> list[str]:
    """Changes a weight that is still to come, and closes the optimizer; says how that ends."""
    model = make_model()
    optimizer = ServerOptimizer(model.named_parameters(), "sgd", lr=0.1, overlap=True)
    loss(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight.zero_()
    return [outcome(optimizer.close), outcome(optimizer.close)]


def changed_before_the_end() -> list[float | str]:
    """Changes a weight on all workers, and ends a training in MODE, without telling the shards, and
    with that; returns how that ends, and the weight.
    """
    mode = os.environ["MODE"]
    options = {"mode": mode, "lr": 0.1, "staleness": 1 if mode == "stale" else None}
    found: list[float | str] = []
    for publishes in (True, False):
        weight = nn.Parameter(torch.ones(4))
        optimizer = ServerOptimizer([weight], "sgd", **options)
        weight.square().sum().backward()
        optimizer.step()
        dist.barrier()  # whose finish() is refused ends the job, also for a step of another
        with torch.no_grad():
            weight.fill_(3.0)
        if publishes:
            optimizer.publish()
        found += [outcome(optimizer.finish), float(weight[0])]
        optimizer.close()
    return found


def loaded_into_views() -> list[bool | str]:
    """Loads weights into parameters that are views of one tensor and travel apart, in both ways.
    Returns how the next step ends, and whether it is the one that followed before.
    """
    both = torch.arange(48.0)
    parameters = [nn.Parameter(part) for part in (both[:16], both[16:])]
    optimizer = ServerOptimizer(parameters, "adam", lr=0.1, bucket_cap_mb=1e-5)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        torch.stack([each.square().sum() for each in parameters]).sum().backward()
        optimizer.step()
        return both.clone()

    step()
    saved = optimizer.state_dict(), optimizer.full_state_dict()
    parts = {name: copy.deepcopy(part) for name, part in optimizer.shards.state_dict().items()}
    expected, found = step(), []
    for way in ("whole", "parts"):
        if way == "whole":
            optimizer.load_state_dict(saved[0])
            optimizer.load_full_state_dict(saved[1])
        else:
            optimizer.shards.load_state_dict(parts)
        found += [outcome(step), torch.equal(both, expected)]
    return found


def published_over_what_is_held_back() -> float:
    """Trains with local updates in CODEC, publishes zeros, and goes on with steps that change each
    weight by 1e-6; returns the largest weight.
    """
    model = make_model()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = LocalOptimizer(inner, every=2, outer={"name": "sgd"}, codec=os.environ["CODEC"])
    for step in range(8):
        optimizer.zero_grad()
        total = sum(each.sum() for each in model.parameters())
        (loss(model, step) if step <= 4 else total).backward()
        optimizer.step()
        if step == 4:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer.publish()
            optimizer.param_groups[0]["lr"] = 1e-6
    return max(float(each.abs().max()) for each in model.parameters())


def gone_back_after_an_explosion() -> float:
    """Trains with CODEC, goes back to a state of before gradients exploded, as HOW says, and goes
    on; returns the largest change since.
    """
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = ServerOptimizer([weight], "sgd", lr=1.0, codec=os.environ["CODEC"])

    def steps(seed: int, size: float) -> None:
        data = torch.Generator().manual_seed(seed + dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            (weight * torch.randn(64, 64, generator=data)).sum().mul(size).backward()
            optimizer.step()

    steps(1, 1e-3)
    saved, full = copy.deepcopy(optimizer.state_dict()), optimizer.full_state_dict()
    before = weight.detach().clone()
    steps(11, 1e3)
    with torch.no_grad():
        weight.copy_(before)
    if os.environ["HOW"] == "publish":
        optimizer.publish()
    else:
        optimizer.load_state_dict(saved)
        optimizer.load_full_state_dict(full)
    steps(21, 1e-3)
    return float((weight.detach() - before).abs().max())


ALL = (
    gone_back_after_an_explosion,
    published_data,
    left_with_the_last_step,
    closed_over_a_change,
    changed_before_the_end,
    loaded_into_views,
    published_over_what_is_held_back,
)
JOBS: dict[str, Callable[[], Any]] = {job.__name__: job for job in ALL}


if __name__ == "__main__":
    job_runner.run(lambda name: JOBS[name]())
