"""Contains jobs whose nodes need not be in the same step: `apart_jobs.py NAME OUT`.

MODE, STALENESS and OPTIMIZER choose what they train with. Every worker records what it pushes,
before it does, and which weights it has after each step, in the folder RECORDS. The store of the
process group keeps the workers apart: nobody sleeps.
"""

import os
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

from thalweg.ps import ServerOptimizer

STEPS = int(os.environ.get("STEPS", "30"))
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adamw": {"lr": 1e-2, "weight_decay": 1e-2},
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 10))


class Trainer:
    """Takes steps on data that depend on the rank and the step alone, and records them."""

    def __init__(self) -> None:
        kind = os.environ.get("OPTIMIZER", "sgd")
        self.model = make_model()
        self.step = 0
        self.grads: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._record_of(name))
        staleness = os.environ.get("STALENESS")
        self.optimizer = ServerOptimizer(
            self.model.named_parameters(),
            kind,
            mode=os.environ.get("MODE", "sync"),
            staleness=None if staleness is None else int(staleness),
            delay_aware="DELAY_AWARE" in os.environ,
            bucket_cap_mb=0.05,  # several
            **OPTIONS[kind],
        )
        names = [[p.name for p in b.parameters] for b in self.optimizer._serving._buckets]
        save("begin", {"buckets": names, "weights": self._weights()})

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            data = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64, generator=data)).square().mean().backward()
            self.optimizer.step()
            save(f"got{self.step}", self._weights())

    def _record_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.grads[name] = parameter.grad.clone()
            save(f"pushed{self.step}.{name}", self.grads[name])

        return record

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


def save(name: str, what: object) -> None:
    """Keeps a record of this worker's."""
    torch.save(what, Path(os.environ["RECORDS"]) / f"{dist.get_rank()}.{name}.pt")


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def slow_one() -> dict[str, Any]:
    """The last rank is slow: it waits for the first one, which is as far ahead as LAG says."""
    trainer, lag = Trainer(), int(os.environ["LAG"])
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    steps = STEPS // lag if is_last and os.environ["MODE"] == "async" else STEPS
    for step in range(1, steps + 1):
        before = _behind(step, lag)
        if is_last and before:
            store().wait([f"ended{before}"])
        trainer.train(1)
        if is_first:
            store().set(f"ended{step}", "")
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model), "stats": trainer.optimizer.stats()}


def _behind(step: int, lag: int) -> int:
    """Returns which step the first rank has ended before the slow one begins this one; 0: none."""
    if step == 1:
        return 0  # all begin together
    if os.environ["MODE"] == "async":
        return lag * (step - 1)  # as fast as it likes: a slow one holds up nobody
    return min(step - 1 + lag, STEPS)  # as far ahead as it may be


def in_step() -> dict[str, Any]:
    """All train as fast as they can, STEPS or until there is a file UNTIL."""
    trainer = Trainer()
    while not is_over(trainer.step, STEPS):
        trainer.train(1)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model)}


def on_and_on() -> str:
    """Trains until something ends the job; returns what."""
    return outcome(lambda: Trainer().train(100_000))


def goes_on() -> dict[str, Any]:
    """Trains, changes weights by hand and takes a checkpoint half-way, and goes on."""
    trainer = Trainer()
    trainer.train(STEPS)
    trainer.optimizer.finish()
    with torch.no_grad():
        trainer.model[0].bias.add_(1.0)
    trainer.optimizer.publish()
    trainer.train(1)
    trainer.optimizer.finish()
    state = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict(state)
    trainer.train(1)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model), "bias": float(trainer.model[0].bias.mean())}


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors."""
    layer = nn.Linear(3, 3)

    def make(kind: str = "sgd", **options: Any) -> str:
        return outcome(lambda: ServerOptimizer(layer.parameters(), kind, **options))

    return [
        make(mode="bulk"),
        make(mode="stale"),
        make(mode="async", staleness=3),
        make(mode="stale", staleness=65),
        make(mode="stale", staleness=2, delay_aware=True),
        make(mode="async", max_grad_norm=1.0),
        make(mode="async", loss_scaling=True),
        make(mode="stale", staleness=1, overlap=True),
        make("lamb", mode="stale", staleness=1),
        make(mode="async", snapshot_every=10),
        make(mode="stale", staleness=dist.get_rank() + 1),
    ]


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (slow_one, in_step, on_and_on, goes_on, refused)
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
