"""Contains jobs of workers that have not sent all of what they have changed:
`local_rests_jobs.py NAME OUT`.
"""

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from jobs import outcome
from torch import nn

from thalweg.ps import LocalOptimizer

ROWS = 64


class Trainer:
    """A worker whose steps change each element by 1 times what is asked for."""

    def __init__(self, codec: str, **options: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(ROWS, 64))
        inner = torch.optim.SGD([self.weight], lr=1.0)
        wanted = {"every": 1, "outer": {"name": "sgd"}} | options
        self.optimizer = LocalOptimizer(inner, codec=codec, **wanted)

    def step(self, change: float, work: float | None = None) -> None:
        self.weight.grad = torch.full_like(self.weight, -change)
        if work is not None:
            self.optimizer.count(work)
        self.optimizer.step()

    def finished(self) -> list[float]:
        """Returns the least and the largest element after finish()."""
        self.optimizer.finish()
        return [self.weight.min().item(), self.weight.max().item()]


def ended_earlier() -> list[float]:
    """Takes nine steps of 1, the last of which counts nothing on rank 1, in CODEC."""
    trainer = Trainer(os.environ["CODEC"], weighted=True)
    for step in range(9):
        has_data = dist.get_rank() == 0 or step < 8
        trainer.step(1.0 if has_data else 0.5, 16.0 if has_data else 0.0)
    return trainer.finished()


def moved() -> list[float]:
    """Takes a step of 1 on rank 0 and 2 on rank 1 in CODEC, and ends in the codec OTHER, with the
    arguments OPTIONS.
    """
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    work = 1.0 if options.get("weighted") else None
    first = Trainer(os.environ["CODEC"], weighted=work is not None)
    first.step(1.0 + dist.get_rank(), work)
    state, weight = copy.deepcopy(first.optimizer.state_dict()), first.weight.detach().clone()
    first.optimizer.close()
    second = Trainer(os.environ["OTHER"], **options)
    second.optimizer.load_state_dict(state)
    again = copy.deepcopy(second.optimizer.state_dict())
    second.optimizer.load_state_dict(again)
    with torch.no_grad():
        second.weight.copy_(weight)
    return second.finished()


def refused() -> str:
    """Exchanges in CODEC; returns the error."""
    return outcome(lambda: Trainer(os.environ["CODEC"]).step(1.0))


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (ended_earlier, moved, refused)
}


if __name__ == "__main__":
    job_runner.run(lambda name: JOBS[name]())
