"""Defines systems that run one training step of a DDP module with almost no computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp
from thalweg.codecs import FP32, PowerSGD, parse
from thalweg_bench.codec_torch import giant_bucket_mb, make_state
from thalweg_bench.compression import warm_up_steps
from thalweg_bench.place import Place
from thalweg_bench.shapes import Shape, count_elements
from thalweg_bench.step_check import make_check
from thalweg_bench.worker import TIMEOUT, System

_PERIOD = 7


class WriteGradient(torch.autograd.Function):
    """The identity; its backward gives `parameter` a gradient that is `value` everywhere."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        x: torch.Tensor,
        parameter: torch.Tensor,
        value: float,
    ) -> torch.Tensor:
        ctx.shape, ctx.value = parameter.shape, value
        return x.clone()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        gradient: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        # It has no memory of its own: it is added to the existing gradient.
        return gradient, torch.tensor(ctx.value).expand(ctx.shape), None


class Memory:
    """Memory of the parameters and gradients of one model. Allocate it before forking workers."""

    def __init__(self, shapes: list[Shape]) -> None:
        self.parameters = _views(torch.zeros(count_elements(shapes)), shapes)
        self.gradients = _views(torch.zeros(count_elements(shapes)), shapes)


def _views(memory: torch.Tensor, shapes: list[Shape]) -> list[torch.Tensor]:
    parts = memory.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class HollowModel(nn.Module):
    """Parameters of a real model; backward writes each gradient once, the last one first.

    The value written on rank r is r, plus a number that tells parameters and repeats apart. All
    models of a worker share the `memory` of their parameters, which is never accessed, and of their
    gradients, which begin_step() makes zero: no step waits for the system to find memory.
    """

    def __init__(self, memory: Memory, rank: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in memory.parameters)
        self._gradients = memory.gradients
        self.offset = 0
        self._rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, parameter in enumerate(self.weights):
            value = self.value(index) + self._rank
            x = WriteGradient.apply(x, parameter, value)  # type: ignore[no-untyped-call]
        return x.sum()

    def begin_step(self, repeat: int) -> None:
        self.offset = repeat
        for parameter, gradient in zip(self.weights, self._gradients, strict=True):
            parameter.grad = gradient.zero_()

    def value(self, index: int) -> int:
        return (index + self.offset) % _PERIOD


class _Step:
    """One backward pass with communication, or, for `local`, without."""

    _compresses = False

    def __init__(
        self,
        model: HollowModel,
        place: Place,
        *,
        local: bool = False,
        bucket_cap_mb: int | None = None,
    ) -> None:
        # The hollow parameters are equal everywhere: nothing needs broadcasting.
        self.module = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=bucket_cap_mb)
        self.codec = parse(place.codec)
        self._model = model
        self._local = local
        self._mean_rank = place.rank if local else (place.world_size - 1) / 2
        codec = self.codec if self._compresses else FP32()
        self._check = make_check(codec, largest=_PERIOD + place.world_size)

    def warm_up(self) -> None:
        for repeat in range(warm_up_steps(self.codec if self._compresses else FP32())):
            self.prepare(repeat)
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        self._model.begin_step(repeat)

    def run(self) -> None:
        with self.module.no_sync() if self._local else nullcontext():
            self.module(torch.ones(1)).backward()

    def check(self) -> None:
        self._check(self._gradients())

    def _gradients(self) -> Iterator[tuple[torch.Tensor, float]]:
        for index, parameter in enumerate(self.module.module.parameters()):
            assert parameter.grad is not None
            yield parameter.grad, self._model.value(index) + self._mean_rank

    def close(self) -> None:
        pass


class _Thalweg(_Step):
    _compresses = True

    def __init__(self, model: HollowModel, place: Place) -> None:
        super().__init__(model, place)
        self._state = ddp.attach(self.module, codec=place.codec, timeout=TIMEOUT)

    def close(self) -> None:
        self._state.close()


class _TorchPowerSgd(_Step):
    """torch's hook hangs over Gloo with more than one bucket."""

    _compresses = True

    def __init__(self, model: HollowModel, place: Place) -> None:
        shapes = [tuple(parameter.shape) for parameter in model.weights]
        super().__init__(model, place, bucket_cap_mb=giant_bucket_mb(shapes))
        assert isinstance(self.codec, PowerSGD)
        # Without epsilon a gradient that is zero everywhere would be divided by its norm.
        state = make_state(self.codec, epsilon=1e-8)
        self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def factories(shapes: list[Shape]) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker whose process group has been started."""
    memory = Memory(shapes)

    def make(
        place: Place, *, build: Callable[[HollowModel, Place], _Step], fp16: bool = False
    ) -> System:
        system = build(HollowModel(memory, place.rank), place)
        if fp16:
            system.module.register_comm_hook(None, fp16_compress_hook)
        system.warm_up()
        return system

    return {
        "thalweg": functools.partial(make, build=_Thalweg),
        "ddp": functools.partial(make, build=_Step),
        "torch-fp16": functools.partial(make, build=_Step, fp16=True),
        "torch-powersgd": functools.partial(make, build=_TorchPowerSgd),
        "local": functools.partial(make, build=functools.partial(_Step, local=True)),
    }
