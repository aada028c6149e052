"""An optimizer for several losses, each with a scale of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from thalweg.amp._scale_loss import scaled
from thalweg.amp._scaler import LossScaler
from thalweg.amp._steward import Steward, steward_of


class Handle(Protocol):
    """What is needed of the handle that `init` gives."""

    def is_active(self) -> bool: ...

    def new_scaler(self) -> LossScaler: ...


class OptimWrapper:
    """What `wrap_optimizer` gives. Everything but losses and steps is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, handle: Handle, num_loss: int) -> None:
        if num_loss < 1:
            raise ValueError(f"num_loss is {num_loss}, expected at least 1")
        self._optimizer = optimizer
        self._handle = handle
        self._scalers = [handle.new_scaler() for _ in range(num_loss)]
        self._next = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Any]:
        """Context for backward() on its value; the n-th since the last step() has the n-th scale.

        Raises:
            RuntimeError: there were more losses since the last step() than `num_loss`.
        """
        if not self._handle.is_active():
            yield loss
            return
        if self._next == len(self._scalers):
            raise RuntimeError(
                f"scale_loss() was called {self._next + 1} times before step(), expected at most "
                f"{len(self._scalers)}: pass num_loss to wrap_optimizer()"
            )
        steward = steward_of(self._optimizer) or Steward(self._optimizer, masters=False)
        scaler = self._scalers[self._next]
        with scaled(loss, steward, scaler) as value:
            yield value
        self._next += 1

    def step(self, closure: None = None) -> Any:  # noqa: ANN401
        """The optimizer's step; nothing if gradients of any loss since the last one overflowed.

        Raises NotImplementedError for a closure.
        """
        if closure is not None:
            raise NotImplementedError(
                "step() was given a closure, expected none: call backward under scale_loss, then "
                "step()"
            )
        self._next = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "_optimizer":  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
