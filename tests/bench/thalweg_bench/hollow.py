"""Defines models of parameters without computation, and steps of them whose gradients are known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thalweg.codecs import Codec
from thalweg_bench.place import Place
from thalweg_bench.step_check import make_check

_PERIOD = 7


class _Write(torch.autograd.Function):
    """The identity, which takes its time; its backward pass, which takes twice as long, gives
    `parameter` a gradient that is `value` everywhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, value: float, seconds: float) -> Tensor:  # noqa: ANN401
        ctx.shape, ctx.value, ctx.seconds = parameter.shape, value, seconds
        _rest(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        _rest(2 * ctx.seconds)
        # It has no memory of its own: it is added to the existing gradient.
        return gradient, torch.tensor(ctx.value).expand(ctx.shape), None, None


def _rest(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


class Block(nn.Module):
    """Parameters; backward writes each one's gradient once, the last one first.

    For each of them a device works for `seconds` in a forward pass, and twice as long in a backward
    pass.
    """

    def __init__(self, weights: Iterable[Tensor], seconds: float = 0.0) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", nn.Parameter(weight))
        self.values = [1.0] * len(self._parameters)
        self._seconds = seconds

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters, which FSDP replaces."""
        return [getattr(self, f"weight{index}") for index in range(len(self.values))]

    def forward(self, x: Tensor) -> Tensor:
        for parameter, value in zip(self.weights, self.values, strict=True):
            x = _Write.apply(x, parameter, value, self._seconds)  # type: ignore[no-untyped-call]
        return x


class Step:
    """A forward and a backward pass; subclasses say what communicates.

    The value written on rank r is r, plus a number that tells parameters and repeats apart.
    """

    module: nn.Module

    def __init__(
        self, blocks: Sequence[Block], place: Place, codec: Codec, *, local: bool = False
    ) -> None:
        """`codec` is what gradients are compared by; `local` says that they are not exchanged."""
        self._blocks, self._place = blocks, place
        self._mean_rank = place.rank if local else (place.world_size - 1) / 2
        self._check = make_check(codec, largest=_PERIOD + place.world_size)
        self._offset = 0

    def warm_up(self, steps: int) -> None:
        for repeat in range(steps):
            self.prepare(repeat)
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        self._offset = repeat
        for number, block in enumerate(self._blocks):
            values = (self._value(number, index) for index in range(len(block.values)))
            block.values = [value + self._place.rank for value in values]
        self.clear()

    def clear(self) -> None:
        """Clears the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def run(self) -> None:
        with self.exchanging():
            self.module(torch.ones(1, requires_grad=True)).sum().backward()

    def exchanging(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None:
        self._check(self._gradients())

    def close(self) -> None:
        """Releases what it holds."""

    def _value(self, block: int, index: int) -> int:
        return (block + index + self._offset) % _PERIOD

    def _gradients(self) -> Iterator[tuple[Tensor, float]]:
        for number, block in enumerate(self._blocks):
            for index, parameter in enumerate(block.weights):
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                if gradient is not None and gradient.numel():
                    yield gradient, self._value(number, index) + self._mean_rank
