"""Defines systems that run one training step with AdamW, on the workers and on the shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp
from thalweg.optim import FusedAdamW
from thalweg.ps import ServerOptimizer
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import Shape
from thalweg_bench.step import HollowModel, Memory
from thalweg_bench.worker import TIMEOUT, System

_LR = 1e-3
_WARM_UP = 2  # steps: buckets are made, then made again; moments are allocated


class _TrainingStep:
    """A backward pass with almost no computation, and what makes new weights of its gradients."""

    def __init__(self, shapes: list[Shape], place: Place) -> None:
        # Systems must not share parameters, which each of them changes.
        self.model = HollowModel(Memory(shapes), place.rank)
        self._before = 0.0

    def warm_up(self) -> None:
        for repeat in range(_WARM_UP):
            self.prepare(repeat)
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        self.model.begin_step(repeat)

    def run(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raises BenchError unless the weights have changed, and are the same on all workers."""
        sums = [parameter.detach().double().sum() for parameter in self.model.parameters()]
        mine = torch.stack(sums).sum()
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        values = {float(each) for each in found}
        if len(values) != 1 or self._before in values:
            raise BenchError(f"sums of weights are {sorted(values)}, before {self._before}")
        self._before = float(mine)

    def close(self) -> None:
        pass


class _OnWorkers(_TrainingStep):
    def __init__(self, shapes: list[Shape], place: Place, clip: float | None) -> None:
        super().__init__(shapes, place)
        self._module = DistributedDataParallel(self.model, init_sync=False)
        self._state = ddp.attach(self._module, codec=place.codec, timeout=TIMEOUT)
        self._optimizer = FusedAdamW(self.model.parameters(), lr=_LR, max_grad_norm=clip)

    def run(self) -> None:
        self._module(torch.ones(1)).backward()
        self._optimizer.step()

    def close(self) -> None:
        self._state.close()


class _OnServers(_TrainingStep):
    def __init__(self, shapes: list[Shape], place: Place, clip: float | None) -> None:
        super().__init__(shapes, place)
        self._optimizer = ServerOptimizer(
            self.model.named_parameters(),
            "adamw",
            lr=_LR,
            codec=place.codec,
            pull=place.codec,
            max_grad_norm=clip,
            timeout=TIMEOUT,
        )

    def run(self) -> None:
        self.model(torch.ones(1)).backward()
        self._optimizer.step()

    def close(self) -> None:
        self._optimizer.close()


_SYSTEMS: dict[str, Any] = {"workers": _OnWorkers, "servers": _OnServers}


def factories(shapes: list[Shape], clip: float | None) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, kind: Any) -> System:  # noqa: ANN401
        system: _TrainingStep = kind(shapes, place, clip)
        system.warm_up()
        return system

    return {name: functools.partial(make, kind=kind) for name, kind in _SYSTEMS.items()}
