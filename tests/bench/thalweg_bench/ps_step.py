"""Defines systems that run training steps with AdamW on the workers, also each by itself, and on
the shards; and systems that train at the pace of `thalweg bench pace`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp
from thalweg.optim import FusedAdamW
from thalweg.ps import LocalOptimizer, ServerOptimizer
from thalweg_bench.hollow import Block
from thalweg_bench.local_case import LocalCase
from thalweg_bench.pace_case import PaceCase
from thalweg_bench.place import Place
from thalweg_bench.ps_case import PsCase
from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import shapes_of, tensors_of
from thalweg_bench.worker import TIMEOUT, Factories, System

_LR = 1e-3
_WARM_UP = 2  # runs: buckets are made, then made again; moments are allocated


def _of_all(mine: Tensor) -> list[float]:
    """Returns all workers' numbers."""
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(each) for each in found]


class _Trainer:
    """Trains a model without computation of its own, on one of the systems of `thalweg bench ps`
    and `local`. When a run ends, its weights are the same everywhere.
    """

    def __init__(self, case: PsCase | LocalCase, place: Place, system: str) -> None:
        self._before = 0.0
        self._steps = case.every if isinstance(case, LocalCase) else case.steps
        tensors = tensors_of(shapes_of(case.model))
        seconds = case.forward / len(tensors)
        self._model = nn.Sequential(*(Block([each], seconds) for each in tensors))
        self._module: nn.Module = self._model
        self._optimizer: torch.optim.Optimizer
        self._opened: Any = None  # what has been joined
        common: dict[str, Any] = {"codec": place.codec, "timeout": TIMEOUT}
        if isinstance(case, LocalCase):
            self._optimizer = FusedAdamW(self._model.named_parameters(), lr=_LR)
            if system == "local":
                self._optimizer = self._opened = LocalOptimizer(
                    self._optimizer, every=case.every, pull=place.codec, **common
                )
        elif system == "workers":
            named = self._model.named_parameters()
            self._optimizer = FusedAdamW(named, lr=_LR, max_grad_norm=case.clip)
            self._module = DistributedDataParallel(self._model, init_sync=False)
            self._opened = ddp.attach(self._module, **common)
        else:
            self._optimizer = self._opened = _on_servers(case, self._model, system, common)
        for _ in range(_WARM_UP):
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        pass

    def run(self) -> None:
        for _ in range(self._steps):
            self._optimizer.zero_grad()
            self._module(torch.ones(1)).sum().backward()
            self._optimizer.step()
        if isinstance(self._optimizer, ServerOptimizer):
            self._optimizer.wait()  # until the weights are there

    def check(self) -> None:
        """Raises BenchError unless the weights have changed, and are the same on all workers."""
        sums = [parameter.detach().double().sum() for parameter in self._model.parameters()]
        values = set(_of_all(torch.stack(sums).sum()))
        if len(values) != 1 or self._before in values:
            raise BenchError(f"sums of weights are {sorted(values)}, before {self._before}")
        (self._before,) = values

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _on_servers(
    case: PsCase, model: nn.Module, system: str, common: dict[str, Any]
) -> ServerOptimizer:
    return ServerOptimizer(
        model.named_parameters(),
        "adamw",
        lr=_LR,
        pull=common["codec"],
        max_grad_norm=case.clip,
        overlap=case.overlap,
        snapshot_every=case.snapshot_every if system == "snapshots" else 0,
        **common,
    )


class _AtPace:
    """A run takes as many steps as the case says, and ends with the same weights everywhere."""

    def __init__(self, case: PaceCase, place: Place, mode: str) -> None:
        self._case, self._mode, self._rank = case, mode, place.rank
        self._run = 0
        self._weights = torch.nn.Parameter(torch.zeros(case.size // 4))
        common: dict[str, Any] = {"codec": place.codec, "timeout": TIMEOUT}
        self._optimizer: ServerOptimizer | LocalOptimizer
        if mode in ("local", "quorum"):
            self._optimizer = LocalOptimizer(
                torch.optim.SGD([self._weights], lr=1.0),
                every=case.every,
                outer={"name": "sgd"},
                quorum=max(1, place.world_size - 1) if mode == "quorum" else None,
                **common,
            )
        else:
            self._optimizer = ServerOptimizer(
                [self._weights],
                "sgd",
                lr=1.0 / place.world_size if mode == "async" else 1.0,
                mode=mode,
                staleness=case.staleness if mode == "stale" else None,
                **common,
            )
        self._step()  # all wait for the first one
        self._optimizer.finish()
        self._before = float(self._weights.detach()[0])

    def prepare(self, repeat: int) -> None:
        self._run += 1

    def run(self) -> None:
        is_drawn = self._mode in ("async", "quorum")
        for step in self._drawn() if is_drawn else range(self._case.steps):
            time.sleep(self._case.seconds_of(self._rank, step))
            self._step()
        self._optimizer.finish()

    def _drawn(self) -> Iterator[int]:
        """Yields a step whenever fewer than all workers' have been begun: slow ones get fewer."""
        store = dist.distributed_c10d._get_default_store()
        limit = self._case.steps * dist.get_world_size()
        step = 0
        while store.add(f"{self._mode} {self._run}", 1) <= limit:
            yield step
            step += 1

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._weights.sum().backward()
        self._optimizer.step()

    def check(self) -> None:
        """Raises BenchError unless all workers have weights from which each step has taken 1; with
        a quorum, whose nodes differ, unless they have the same.
        """
        found = _of_all(self._weights.detach()[:1].double())
        expected = self._before - self._case.steps
        push = 1 / dist.get_world_size()  # what a single one takes in the asynchronous mode
        is_right = self._mode == "quorum" or abs(found[0] - expected) <= push / 2
        if len(set(found)) != 1 or not found[0] < self._before or not is_right:
            raise BenchError(f"weights are {found}, not {expected}")
        self._before = found[0]

    def close(self) -> None:
        self._optimizer.close()


def factories(case: PsCase | LocalCase | PaceCase) -> Factories:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, system: str) -> System:
        if isinstance(case, PaceCase):
            return _AtPace(case, place, system.split(maxsplit=1)[0])
        return _Trainer(case, place, system)

    return {name: functools.partial(make, system=name) for name in case.systems}
