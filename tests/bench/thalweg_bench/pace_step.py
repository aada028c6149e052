"""Defines systems that train at the pace of `thalweg bench pace`: workers sleep, and push."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.ps import ServerOptimizer
from thalweg_bench.pace_case import PaceCase
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.worker import TIMEOUT, System


class _Trainer:
    """A run takes as many steps as the case says, and ends with the same weights everywhere."""

    def __init__(self, case: PaceCase, mode: str, place: Place) -> None:
        self._case = case
        self._mode = mode
        self._rank = place.rank
        self._run = 0
        self._weights = torch.nn.Parameter(torch.zeros(case.size // 4))
        self._optimizer = ServerOptimizer(
            [self._weights],
            "sgd",
            lr=1.0 / place.world_size if mode == "async" else 1.0,
            mode=mode,
            staleness=case.staleness if mode == "stale" else None,
            codec=place.codec,
            timeout=TIMEOUT,
        )
        self._step(0)  # all wait for the first one
        self._optimizer.finish()
        self._before = float(self._weights.detach()[0])

    def prepare(self, repeat: int) -> None:
        self._run += 1

    def run(self) -> None:
        steps = self._drawn() if self._mode == "async" else range(self._case.steps)
        for step in steps:
            time.sleep(self._case.seconds_of(self._rank, step))
            self._step(step)
        self._optimizer.finish()

    def _drawn(self) -> Iterator[int]:
        """Yields a step whenever fewer than all workers' have been begun: slow ones get fewer."""
        store = dist.distributed_c10d._get_default_store()
        limit = self._case.steps * dist.get_world_size()
        step = 0
        while store.add(f"pace {self._run}", 1) <= limit:
            yield step
            step += 1

    def _step(self, step: int) -> None:
        self._optimizer.zero_grad()
        self._weights.sum().backward()
        self._optimizer.step()

    def check(self) -> None:
        """Raises BenchError unless all workers have weights from which each step has taken 1."""
        mine = self._weights.detach()[:1].double()
        found: list[Tensor] = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        values = {float(each) for each in found}
        expected = self._before - self._case.steps
        push = 1 / dist.get_world_size()  # what a single one takes in the asynchronous mode
        if len(values) != 1 or abs(values.pop() - expected) > push / 2:
            raise BenchError(f"weights are {[float(each) for each in found]}, not {expected}")
        self._before = float(mine)

    def close(self) -> None:
        self._optimizer.close()


def factories(case: PaceCase) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, mode: str) -> System:
        return _Trainer(case, mode, place)

    return {name: functools.partial(make, mode=name.split()[0]) for name in case.systems}
