"""Runs torch.optim's SGD, Adam and AdamW fused in scripts that do not mention Thalweg.

It is part of `import torch` when the environment asks for it: loads no native code before the first
step. An optimizer that cannot be fused takes torch's own step, which is counted and logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

from thalweg._settings import _logging
from thalweg._settings._config import Activation
from thalweg._torch import _patches
from thalweg.optim._counts import fallbacks, fused_steps


def activate() -> None:
    """Makes SGD, Adam and AdamW take the fused step where they can."""
    for kind, name in ((SGD, "sgd_step"), (Adam, "adam_step")):
        step = functools.partial(_step, kind, name)
        _patches.install("fused_optimizers", kind, "step", step)
    _patches.install("fused_optimizers", SGD, "__setstate__", _set_and_hide)


def _step(
    kind: type[Optimizer],
    name: str,
    original: Callable[[Optimizer], Any],
    optimizer: Optimizer,
    /,
    closure: Callable[[], Any] | None = None,
) -> Any:  # noqa: ANN401
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    reason = _run(optimizer, kind, name)
    if reason:
        if not fallbacks[reason]:
            text = f"torch.optim.{type(optimizer).__name__} keeps torch's step: {reason}"
            _logging.say(logging.WARNING, text)
        fallbacks[reason] += 1
        original(optimizer)
    return loss


def _set_and_hide(
    set_state: Callable[[Optimizer, dict[str, Any]], None],
    optimizer: Optimizer,
    /,
    state: dict[str, Any],
) -> None:
    """Hides the steps that a copy or pickle has brought along; torch's SGD counts none. Subclasses
    with a step of their own may.
    """
    set_state(optimizer, state)
    if type(optimizer).step is not SGD.step:
        return
    if any("step" in each for each in optimizer.state.values()):
        from thalweg.optim._state import hide_steps

        hide_steps(optimizer)


@torch.no_grad()
def _run(optimizer: Optimizer, kind: type[Optimizer], name: str) -> str:
    """Does a step and returns an empty text, or changes nothing and returns why. RuntimeError: a
    CUDA graph is captured.
    """
    type_name = type(optimizer).__name__
    try:
        from thalweg import _C
        from thalweg.optim import _refusals, _steps
        from thalweg.optim._fused import refuse_capture, unscale_grads
    except ImportError as error:
        return f"thalweg is not installed properly: {error}"
    if type(optimizer)._init_group is not kind._init_group:  # type: ignore[attr-defined]
        return f"{type_name} is a subclass with state of its own"
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return "capturable or differentiable is set"
    refuse_capture(optimizer)
    # It is read here, because a malformed variable must not break `import torch`.
    asked = "" if fused_steps[type_name] else Activation.from_env().fused_optimizer
    try:
        with _refusals.remembered_refusals(optimizer):
            getattr(_steps, name)(optimizer, own=False)
            unscale_grads(optimizer)
    except _C.NotFusable as error:
        return str(error).removeprefix("thalweg: ")
    fused_steps[type_name] += 1
    if asked:
        _logging.say(logging.INFO, f"torch.optim.{type_name} runs fused: {asked}")
    return ""
