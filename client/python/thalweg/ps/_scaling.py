"""Lets GradScaler ask the shards whether gradients are finite, which are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from thalweg._torch import _patches


class Asked(Protocol):
    """An optimizer whose gradients are on shards."""

    def look_for_infinities(self, inverse_scale: float) -> bool: ...


_asked: weakref.WeakSet[Asked] = weakref.WeakSet()


def watch(optimizer: Asked) -> None:
    """From now on scalers ask the optimizer, instead of looking at gradients."""
    _patches.install("ps", GradScaler, "_unscale_grads_", _unscale)
    _asked.add(optimizer)


def _unscale(
    unscale: Callable[..., dict[torch.device, Tensor]],
    scaler: GradScaler,
    optimizer: Optimizer,
    inv_scale: Tensor,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> dict[torch.device, Tensor]:
    asked = next((each for each in _asked if id(each) == id(optimizer)), None)
    if asked is None:
        return unscale(scaler, optimizer, inv_scale, *args, **kwargs)
    found = asked.look_for_infinities(float(inv_scale))
    return {torch.device("cpu"): torch.tensor(float(found), device="cpu")}
