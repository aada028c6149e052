"""`scale_loss`: the one line around backward()."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thalweg.amp._casts import casting
from thalweg.amp._scaler import LossScaler
from thalweg.amp._state import state
from thalweg.amp._steward import Steward, steward_of


@contextmanager
def scale_loss(  # noqa: PLR0917 - apex's order
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Context in which to call backward(): on its value, the loss times the current scale.

    When the context ends, the optimizers' parameters have gradients of the unscaled loss, added to
    those they had. If any is not finite, the scale of this loss is divided and the next step() of
    these optimizers does nothing.

    Args:
        loss: scalar, in any floating point type; the value is float32.
        optimizers: those, from initialize(), whose parameters the loss has gradients for.
        loss_id: which loss scale to use, below `num_losses` of initialize().
        model: accepted as apex does, and not used.
        delay_unscale: leave gradients as they are; they accumulate until a context without it. For
            all but the last backward before step(), when gradients accumulate under DDP.
        delay_overflow_check: divide, but take notice of overflows only in a later context with the
            same `loss_id` and without it.

    Raises:
        RuntimeError: initialize() has not been called, or not with one of the optimizers.
        ValueError: there is no such `loss_id`.
    """
    if state.options is None:
        raise RuntimeError(
            "scale_loss() was called before initialize(), expected after it: pass model and "
            "optimizer to thalweg.amp.initialize() first"
        )
    if not state.options.enabled:
        yield loss
        return
    if not 0 <= loss_id < len(state.loss_scalers):
        raise ValueError(
            f"loss_id is {loss_id}, expected one below {len(state.loss_scalers)}: pass num_losses "
            "to initialize()"
        )
    stewards = _stewards_of(optimizers)
    scaler = state.loss_scalers[loss_id]
    casting.stepping = False  # should a step have ended in an exception
    for steward in stewards:
        steward.begin(scaler)
    try:
        yield loss.float() * scaler.loss_scale()
    except BaseException:
        for steward in stewards:
            steward.abandon()
        raise
    done: set[int] = set()
    for steward in stewards:
        steward.end(scaler, delay_unscale=delay_unscale, done=done)
    casting.clear_cache()
    if delay_unscale or delay_overflow_check or not scaler.update_scale():
        return
    state.say(
        f"gradients of loss {loss_id} are not finite: the step is skipped, the loss scale is now "
        f"{scaler.loss_scale()}"
    )
    for steward in stewards:
        steward.skip = True


def _stewards_of(optimizers: Optimizer | Sequence[Optimizer]) -> list[Steward]:
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    stewards = []
    for optimizer in given:
        steward = steward_of(optimizer)
        if steward is None or steward.native:
            raise RuntimeError(
                f"{type(optimizer).__name__} was not given to initialize(), expected one that was: "
                "pass all optimizers to it, and scale its losses with nothing else"
            )
        stewards.append(steward)
    return stewards


@contextmanager
def scaled(loss: Tensor, steward: Steward, scaler: LossScaler) -> Iterator[Any]:
    """Context for one backward; sets `steward.skip` if gradients are not finite."""
    casting.stepping = False  # should a step have ended in an exception
    steward.begin(scaler)
    try:
        yield loss.float() * scaler.loss_scale()
    except BaseException:
        steward.abandon()
        raise
    steward.end(scaler, delay_unscale=False, done=set())
    casting.clear_cache()
    if scaler.update_scale():
        state.say(
            "gradients are not finite: the step is skipped, the loss scale is now "
            f"{scaler.loss_scale()}"
        )
        steward.skip = True


@contextmanager
def warn_of_unscaled(loss: Tensor) -> Iterator[None]:
    """Warns if backward() is called on the loss itself."""
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
