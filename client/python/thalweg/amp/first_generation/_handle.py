"""The handle of apex's first AMP: casts of functions, scaled losses, wrapped optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.amp._casts import casting
from thalweg.amp._functions import (
    Casts,
    NoCasts,
    Replacements,
    activate_casts,
    deactivate_casts,
    replace_rnn,
)
from thalweg.amp._initialize import scaled_backward
from thalweg.amp._optimizer import MixedOptimizer, mixed_optimizer_of
from thalweg.amp._scaling import LossScaler
from thalweg.amp._state import read_loss_scale, state


class NoOpHandle(NoCasts):
    """The handle of `init(enabled=False)`, whose calls do nothing."""

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Any]:
        """Yields the loss itself, to call backward() on."""
        yield loss

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Returns an optimizer for several losses, each with a `scale_loss` of its own."""
        return OptimWrapper(optimizer, self, num_loss)

    def new_scaler(self) -> LossScaler:
        """Returns the scaler of one loss."""
        return LossScaler(1.0)


class AmpHandle(Casts, NoOpHandle):
    """The handle of `init`: casts by lists are on until `_deactivate` or the next `init`."""

    def __init__(self, loss_scale: float | str, replacements: Replacements) -> None:
        super().__init__(replacements)
        self._loss_scale = loss_scale
        self._default_scaler: LossScaler | None = self.new_scaler()

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Any]:
        """Yields the float32 loss times the scale, to call backward() on.

        Afterwards gradients are divided by the scale, in place, unless they are not finite: then
        the scale is halved and the next `optimizer.step()` does nothing.

        Raises:
            RuntimeError: `wrap_optimizer` has been called; its result has the scales.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "scale_loss() of the handle was called after wrap_optimizer(), expected "
                "scale_loss() of the wrapped optimizer: it has a scale for each loss"
            )
        with _warn_of_unscaled(loss), _scaled(loss, optimizer, self._default_scaler) as value:
            yield value

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Returns an optimizer for several losses; the handle's `scale_loss` raises from now on."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    def new_scaler(self) -> LossScaler:
        """Returns the scaler of one loss."""
        return LossScaler(self._loss_scale)

    def __enter__(self) -> AmpHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deactivate()


class OptimWrapper:
    """The result of `wrap_optimizer`. All but losses and steps is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, handle: NoOpHandle, num_loss: int) -> None:
        if num_loss < 1:
            raise ValueError(f"num_loss is {num_loss}, expected at least 1")
        self._optimizer = optimizer
        self._handle = handle
        self._scalers = [handle.new_scaler() for _ in range(num_loss)]
        self._next = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Any]:
        """Yields the scaled loss; the n-th loss since the last step() has the n-th scale.

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
        with _scaled(loss, self._optimizer, self._scalers[self._next]) as value:
            yield value
        self._next += 1

    def step(self, closure: None = None) -> Any:  # noqa: ANN401
        """Takes the optimizer's step, unless gradients of any loss since the last one overflowed.

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


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    loss_scale: float | str = "dynamic",
    *,
    enable: bool | None = None,
    half_dtype: torch.dtype = torch.float16,
) -> NoOpHandle:
    """Makes torch's functions cast their arguments, by the lists of `thalweg.amp.lists`.

    Args:
        enabled: with False, the handle does nothing.
        enable_caching: cast a parameter once per iteration, not in every function that uses it.
        verbose: print each cast, e.g. `Float->Half (conv2d)`.
        allow_banned: compute binary_cross_entropy in float32 instead of refusing half precision.
        loss_scale: "dynamic", or a positive number, for each loss.
        enable: another name of `enabled`, which scripts use.
        half_dtype: torch.float16 or torch.bfloat16.

    Returns:
        AmpHandle, or NoOpHandle.

    Raises:
        ValueError: `loss_scale` or `half_dtype` is malformed.
    """
    if not (enabled if enable is None else enable):
        deactivate_casts()
        state.handle = handle = NoOpHandle()
        return handle
    scale = read_loss_scale(loss_scale)
    if half_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"half_dtype is {half_dtype}, expected torch.float16 or torch.bfloat16")
    replacements = activate_casts(
        half_dtype,
        enable_caching=enable_caching,
        verbose=verbose,
        allow_banned=allow_banned,
    )
    state.handle = handle = AmpHandle(scale, replacements)
    return handle


def rnn_cast(backend: Any, name: str, handle: NoOpHandle, verbose: bool = False) -> None:  # noqa: ANN401
    """Makes the recurrent function `backend.name` compute in half while `handle` is active.

    init() does so with all of torch's own. Weights in lists are cast, and cached, like arguments.
    With `verbose`, all casts of the handle are printed.
    """
    if isinstance(handle, AmpHandle) and handle.is_active():
        casting.verbose = casting.verbose or verbose
        replace_rnn(handle._replacements, backend, name)


@contextmanager
def _scaled(loss: Tensor, optimizer: Optimizer, scaler: LossScaler) -> Iterator[Any]:
    """Yields the loss to call backward on; the optimizer needs no initialize()."""
    mixed = mixed_optimizer_of(optimizer) or MixedOptimizer(optimizer, masters=False)
    with scaled_backward(loss, [mixed], scaler) as value:
        yield value


@contextmanager
def _warn_of_unscaled(loss: Tensor) -> Iterator[None]:
    """Warns if backward() is called on the loss itself within the context."""
    backward = loss.backward

    def warn_and_run(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        warnings.warn(
            "backward() was called on the loss inside scale_loss(), expected on the value of the "
            "context: gradients are divided by a scale that they do not have",
            stacklevel=2,
        )
        backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    loss.backward = warn_and_run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loss.backward
