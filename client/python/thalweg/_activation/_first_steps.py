"""Sees the first step of each optimizer: what a script that does not mention Thalweg trains with,
and how, is not known earlier.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from thalweg._settings._config import ConfigError

_T = TypeVar("_T")
_Look = Callable[[Optimizer], bool | None]


def before_each(look: _Look) -> RemovableHandle:
    """Calls `look` with every optimizer that begins its first step in a job of several workers, but
    with none that Thalweg has made for itself (`is_internal`). Steps that only make an optimizer's
    state, with which a training resumes, do not count where gradients are plain tensors. `look`
    returns False where it cannot tell yet: it is called again in the next step.
    """
    return register_optimizer_step_pre_hook(_once(look))


def after_each(look: _Look) -> RemovableHandle:
    """Does the same at the end of that step."""
    return register_optimizer_step_post_hook(_once(look))


def read(from_env: Callable[[], _T]) -> _T:
    """Returns settings. A ConfigError reaches the script, so that it begins with our name."""
    try:
        return from_env()
    except ConfigError as error:
        raise ConfigError(f"thalweg: {error}") from None


def _makes_state(optimizer: Optimizer) -> bool:
    """Returns whether the step is none of the training, and is only done for the optimizer to have
    a state: torch.distributed.checkpoint does that before it saves or loads one.
    """
    if any(_may_change(group.get("lr")) for group in optimizer.param_groups):
        return False
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    # Workers have different parts of other kinds of gradients, so they would not agree.
    return all(type(p.grad) is Tensor and not p.grad.any() for p in trained)


def _may_change(rate: object) -> bool:
    return rate is None or float(rate) != 0  # type: ignore[arg-type]


def _once(look: _Look) -> Callable[..., None]:
    seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def hook(optimizer: Optimizer, *_: object) -> None:
        if optimizer in seen or getattr(optimizer, "is_internal", False):
            return
        if dist.is_initialized() and dist.get_world_size() > 1 and not _makes_state(optimizer):
            seen.add(optimizer)
            if look(optimizer) is False:
                seen.discard(optimizer)

    return _disable_dynamo(hook)
