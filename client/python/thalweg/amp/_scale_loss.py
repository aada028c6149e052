"""The context around backward() in which a loss is scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thalweg._precision import announce
from thalweg.amp._casts import casting
from thalweg.amp._optimizer import MixedOptimizer, mixed_optimizer_of
from thalweg.amp._scaling import LossScaler
from thalweg.amp._state import state


@contextmanager
def scale_loss(  # noqa: PLR0917 - apex's order
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Yields the loss times the current scale, on which backward() is to be called.

    When the context ends, the optimizers' parameters have gradients of the unscaled loss, added to
    those they had. If any is not finite, the scale of this loss is lowered and the next step() of
    these optimizers does nothing. If the body raises, gradients are what they were before; after a
    context with `delay_unscale` they stay multiplied, and keep what a backward has added until it
    failed.

    Args:
        loss: a scalar of any floating point type; the yielded value is float32.
        optimizers: those from initialize() whose parameters the loss has gradients for.
        loss_id: which loss scale to use, below `num_losses` of initialize().
        model: accepted as apex does, and not used.
        delay_unscale: leave gradients as they are, so that they accumulate until a context without
            it. Use it for all but the last backward before step() when gradients accumulate under
            DDP.
        delay_overflow_check: divide, but let only a later context with the same `loss_id` and
            without it act on overflows.

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
    with scaled_backward(
        loss,
        _initialized(optimizers),
        state.loss_scalers[loss_id],
        what=f"gradients of loss {loss_id}",
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    ) as scaled:
        yield scaled


@contextmanager
def scaled_backward(
    loss: Tensor,
    optimizers: Sequence[MixedOptimizer],
    scaler: LossScaler,
    *,
    what: str = "gradients",
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the scaled loss; afterwards divides gradients and sees to overflows.

    This is the only place that does so for the scales of this package. `what` names the gradients
    in the message about a skipped step; the documentation of `scale_loss` explains the delays, and
    what happens if the body raises.
    """
    casting.stepping = False  # a step may have ended in an exception
    done: set[int] = set()
    for optimizer in optimizers:
        optimizer.begin_backward(scaler, done=done)
    if not scaler.trivial:
        announce(scaler, scaler.loss_scale())
    try:
        yield loss.float() * scaler.loss_scale()
    except BaseException:
        for optimizer in optimizers:
            optimizer.abandon_backward(scaler)
        raise
    done = set()
    for optimizer in optimizers:
        optimizer.end_backward(scaler, delay_unscale=delay_unscale, done=done)
    casting.clear_cache()
    if delay_unscale or delay_overflow_check or not scaler.update_scale():
        return
    state.say(
        f"{what} are not finite: the step is skipped, the loss scale is now {scaler.loss_scale()}"
    )
    for optimizer in optimizers:
        optimizer.skip = True


def _initialized(optimizers: Optimizer | Sequence[Optimizer]) -> list[MixedOptimizer]:
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    found = []
    for optimizer in given:
        mixed = mixed_optimizer_of(optimizer)
        if mixed is None or mixed.native:
            raise RuntimeError(
                f"{type(optimizer).__name__} was not given to initialize(), expected one that was: "
                "pass all optimizers to it, and scale its losses with nothing else"
            )
        found.append(mixed)
    return found
