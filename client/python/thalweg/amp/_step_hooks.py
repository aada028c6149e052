"""Sees to it that steps of all optimizers run torch's hooks, and that closures run with casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from thalweg.amp._casts import casting


def have_step_run_hooks(optimizer: Optimizer) -> None:
    """Sees to it for wrappers of optimizers that leave out Optimizer.__init__, which would.

    Raises RuntimeError if it cannot.
    """
    if getattr(type(optimizer).step, "hooked", False):
        return
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        return  # the hooks are those of an optimizer within, whose step runs them
    if "step" in vars(optimizer):
        raise RuntimeError(
            f"step of a {type(optimizer).__name__} has been replaced, expected its own: it does "
            "not run torch's hooks. Build schedulers and the like after mixed precision is set up"
        )
    optimizer._patch_step_function()


def with_casts(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a closure for a step, which computes the loss with the casts that are off there."""

    def run() -> Any:  # noqa: ANN401
        casting.stepping = False
        loss = closure()
        casting.stepping = True
        return loss

    return run
