"""Defines systems that run training steps with AdamW: on the workers, also by themselves, and on
the shards.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp
from thalweg.optim import FusedAdamW
from thalweg.ps import LocalOptimizer, ServerOptimizer
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import Shape
from thalweg_bench.worker import TIMEOUT, System

_LR = 1e-3
_WARM_UP = 2  # runs: buckets are made, then made again; moments are allocated


@dataclass(frozen=True)
class Training:
    """What a run does."""

    shapes: list[Shape]
    steps: int = 1
    # A device's work, during which the processor rests: in each forward pass, and twice as long in
    # each backward pass, equally long for each parameter.
    forward_seconds: float = 0.0
    clip: float | None = None  # the norm to which gradients are clipped
    overlap: bool = False  # of weights that come with the next forward pass
    snapshot_every: int = 0  # steps, of the system "snapshots"


class _Work(torch.autograd.Function):
    """The identity, which takes its time; gives `parameter` a gradient that is 1 everywhere."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: Tensor,
        parameter: Tensor,
        seconds: float,
    ) -> Tensor:
        ctx.shape, ctx.seconds = parameter.shape, seconds
        _rest(seconds)
        return x.clone()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, None]:
        _rest(2 * ctx.seconds)
        return gradient, torch.ones(()).expand(ctx.shape), None


def _rest(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


class _Layer(nn.Module):
    def __init__(self, weight: Tensor, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight, self._seconds)  # type: ignore[no-any-return,no-untyped-call]


def _make_model(training: Training) -> nn.Sequential:
    seconds = training.forward_seconds / len(training.shapes)
    sizes = [math.prod(shape) for shape in training.shapes]
    parts = torch.zeros(sum(sizes)).split(sizes)
    weights = (part.view(shape) for part, shape in zip(parts, training.shapes, strict=True))
    return nn.Sequential(*(_Layer(weight, seconds) for weight in weights))


class _Trainer:
    """Trains a model without computation of its own."""

    optimizer: torch.optim.Optimizer
    module: nn.Module

    def __init__(self, training: Training) -> None:
        self._training = training
        self.model = _make_model(training)
        self._before = 0.0

    def warm_up(self) -> None:
        for _ in range(_WARM_UP):
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        pass

    def run(self) -> None:
        for _ in range(self._training.steps):
            self.optimizer.zero_grad()
            self.module(torch.ones(1)).sum().backward()
            self.optimizer.step()
        self.finish()

    def finish(self) -> None:
        """Returns when the weights are there."""

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


class _OnWorkers(_Trainer):
    def __init__(self, training: Training, place: Place) -> None:
        super().__init__(training)
        self.module = DistributedDataParallel(self.model, init_sync=False)
        self._state = ddp.attach(self.module, codec=place.codec, timeout=TIMEOUT)
        self.optimizer = FusedAdamW(self.model.parameters(), lr=_LR, max_grad_norm=training.clip)

    def close(self) -> None:
        self._state.close()


class _OnServers(_Trainer):
    def __init__(self, training: Training, place: Place, snapshot_every: int = 0) -> None:
        super().__init__(training)
        self.module = self.model
        self._servers = self.optimizer = ServerOptimizer(
            self.model.named_parameters(),
            "adamw",
            lr=_LR,
            codec=place.codec,
            pull=place.codec,
            max_grad_norm=training.clip,
            overlap=training.overlap,
            snapshot_every=snapshot_every,
            timeout=TIMEOUT,
        )

    def finish(self) -> None:
        self._servers.wait()

    def close(self) -> None:
        self._servers.close()


class _WithSnapshots(_OnServers):
    def __init__(self, training: Training, place: Place) -> None:
        super().__init__(training, place, training.snapshot_every)


class _Local(_Trainer):
    """A run is an interval: the weights are the same on all workers when it ends."""

    def __init__(self, training: Training, place: Place) -> None:
        super().__init__(training)
        self.module = self.model
        self._local = self.optimizer = LocalOptimizer(
            FusedAdamW(self.model.named_parameters(), lr=_LR, max_grad_norm=training.clip),
            every=training.steps,
            codec=place.codec,
            pull=place.codec,
            timeout=TIMEOUT,
        )

    def close(self) -> None:
        self._local.close()


_SYSTEMS: dict[str, Any] = {
    "workers": _OnWorkers,
    "servers": _OnServers,
    "snapshots": _WithSnapshots,
    "local": _Local,
}


def factories(training: Training) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, kind: Any) -> System:  # noqa: ANN401
        system: _Trainer = kind(training, place)
        system.warm_up()
        return system

    return {name: functools.partial(make, kind=kind) for name, kind in _SYSTEMS.items()}
