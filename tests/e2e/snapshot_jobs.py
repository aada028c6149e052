"""Contains jobs whose shards take snapshots: `snapshot_jobs.py NAME OUT`.

EVERY is the number of steps between two snapshots, STEPS how many the training has if it does not
go on until there is a file UNTIL, and PROGRESS a file into which the first worker writes how many
steps it has tried, and how often it has gone back. FOLDERS are those of aggregators of an earlier
training, which this one goes on from.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from endings import is_over
from jobs import outcome
from torch import nn

import thalweg.optim
from thalweg.ps import RolledBack, ServerOptimizer

STEPS = int(os.environ.get("STEPS", "30"))
EVERY = int(os.environ.get("EVERY", "5"))
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95)}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 10))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(8, 64, generator=data)).square().mean()


def alone(steps: int) -> list[str]:
    """Trains in this process alone. Returns the digest of the weights before each step, and after
    the last.
    """
    model = _model()
    optimizer = thalweg.optim.FusedAdamW(model.parameters(), **OPTIONS)
    digests = [digest(model)]
    for step in range(steps):
        grads = []
        for rank in range(dist.get_world_size()):
            grads.append(torch.autograd.grad(_loss(model, step, rank), list(model.parameters())))
        for parameter, *parts in zip(model.parameters(), *grads, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        optimizer.step()
        digests.append(digest(model))
    return digests


def trained_through_losses() -> dict[str, Any]:
    """Trains, and goes back when it must. Returns how far, and what the weights were then."""
    model = _model()
    optimizer = _served(model)
    loaded = _loaded(optimizer)
    step, tried = loaded, 0
    rolled_back: list[int] = []
    restored = [(step, digest(model))]
    while not is_over(step, STEPS):
        tried += 1
        try:
            optimizer.zero_grad()
            _loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            step += 1
        except RolledBack as lost:
            step = lost.step
            rolled_back.append(step)
            restored.append((step, digest(model)))
            optimizer.publish()  # goes on with the same weights
        _tell(tried, len(rolled_back))
    model.state_dict()  # with overlap, the last weights may still be on their way
    expected = alone(step)
    return {
        "rolled back": rolled_back,
        "wrong": [at for at, weights in restored if weights != expected[at]],
        "loaded": loaded,
        "updates": optimizer.updates,
        "weights": digest(model),
        "expected": expected[step],
    }


def _served(model: nn.Module) -> ServerOptimizer:
    return ServerOptimizer(
        model.named_parameters(),
        "adamw",
        bucket_cap_mb=0.1,
        snapshot_every=EVERY,
        overlap="OVERLAP" in os.environ,
        **OPTIONS,
    )


def _loaded(optimizer: ServerOptimizer) -> int:
    """Returns the step that it goes on from."""
    folders = os.environ.get("FOLDERS", "")
    return optimizer.load_snapshot(folders.split(":")) if folders else 0


def _tell(tried: int, rolled_back: int) -> None:
    path = os.environ.get("PROGRESS", "")
    if path and dist.get_rank() == 0:
        new = Path(path + ".new")
        new.write_text(f"{tried} {rolled_back}", encoding="ascii")
        new.rename(path)


def trained_on_and_on() -> str:
    """Trains until something ends the job; returns what."""
    model = _model()

    def train() -> None:
        optimizer = _served(model)
        for step in range(_loaded(optimizer), 100_000):
            optimizer.zero_grad()
            _loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            _tell(step, 0)

    return outcome(train)


def trained_to_an_end() -> None:
    """Takes STEPS steps, and ends as END says: "well", or by what nobody catches."""
    model = _model()
    optimizer = _served(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step, dist.get_rank()).backward()
        optimizer.step()
    if os.environ["END"] == "interrupted":
        # What a shell has started in the background ignores it, and so do its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
    if os.environ["END"] == "closed by its fault":
        with contextlib.closing(optimizer):
            raise ValueError("a loss that is not a number")
    if os.environ["END"] == "raised":
        raise ValueError("a loss that is not a number")


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (trained_through_losses, trained_on_and_on, trained_to_an_end)
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
