"""torch.optim's SGD, Adam and AdamW run fused in scripts that do not mention Thalweg.

Part of `import torch` when the environment asks for it: loads no native code before the first step.
What cannot be fused takes torch's own step, is counted, and said once.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import SGD, Adam, Optimizer

from thalweg._config import Activation

_Original = Callable[..., Any]

# Steps since the process began: those that ran fused, and by reason those that could not.
fused_steps: collections.Counter[str] = collections.Counter()
fallbacks: collections.Counter[str] = collections.Counter()


def activate() -> None:
    """From now on SGD, Adam and AdamW take the fused step where they can. Call it once."""
    SGD.step = _wrap(SGD, "sgd_step")  # type: ignore[method-assign]
    Adam.step = _wrap(Adam, "adam_step")  # type: ignore[method-assign]


def _wrap(kind: type[Optimizer], name: str) -> _Original:
    original: _Original = kind.step

    @functools.wraps(original)
    @_disable_dynamo
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reason = _run(self, kind, name)
        if reason:
            if not fallbacks[reason]:
                _say(self, logging.WARNING, f"keeps torch's step: {reason}")
            fallbacks[reason] += 1
            original(self)
        return loss

    return step


@torch.no_grad()
def _run(optimizer: Optimizer, kind: type[Optimizer], name: str) -> str:
    """Does a step and returns an empty text, or changes nothing and returns why."""
    type_name = type(optimizer).__name__
    try:
        from thalweg import _C
        from thalweg.optim import _steps
    except ImportError as error:
        return f"thalweg is not installed properly: {error}"
    if type(optimizer)._init_group is not kind._init_group:  # type: ignore[attr-defined]
        return f"{type_name} is a subclass with state of its own"
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return "capturable or differentiable is set"
    # Here, because a malformed variable must not break `import torch`.
    asked = "" if fused_steps[type_name] else Activation.from_env().fused_optimizer
    try:
        getattr(_steps, name)(optimizer, own=False)
    except _C.NotFusable as error:
        return str(error).removeprefix("thalweg: ")
    fused_steps[type_name] += 1
    if asked:
        _say(optimizer, logging.INFO, f"runs fused: {asked}")
    return ""


def _say(optimizer: Optimizer, level: int, text: str) -> None:
    """On rank 0; visible also if the script has not set up logging."""
    from thalweg._zero_code import prepare_logger

    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    logger = prepare_logger(Activation.from_env().log_level)
    logger.log(level, "torch.optim.%s %s", type(optimizer).__name__, text)
