"""Runs steps of mixed precision: from half gradients to half parameters, with float32 masters.

It uses only torch's operations: scripts/gpu_torch_bench.py uses this file where Thalweg is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MixedSequence:
    """A step of O2 in torch's operations, one after the other, as in apex."""

    def __init__(
        self,
        params: list[nn.Parameter],
        update: Callable[[], object],
        *,
        half: torch.dtype,
        is_scaled: bool,
    ) -> None:
        """`params`, float32 with gradients, are the masters, which `update` updates.

        `half` is the type of gradients and of the model. Without a scale nothing is divided or
        checked.
        """
        self._grads = [grad_of(param).to(half) for param in params]
        self._model = [param.detach().to(half) for param in params]
        self._is_scaled = is_scaled
        self._masters: list[Tensor] = [*params]
        self._update = update
        device = params[0].device
        self._found_inf = torch.zeros((), device=device)
        self._inverse = torch.full((), 2.0**-16, device=device)  # of the scale that O2 starts with

    @torch.no_grad()
    def step(self) -> None:
        """Converts gradients to float32, checks and divides, updates, and rounds to the model."""
        grads = [master.grad for master in self._masters if master.grad is not None]
        torch._foreach_copy_(grads, self._grads)
        if self._is_scaled:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found_inf, self._inverse)
        if not self._is_scaled or self._found_inf.item() == 0:
            self._update()
        torch._foreach_copy_(self._model, self._masters)


def grad_of(param: Tensor) -> Tensor:
    """Returns the gradient, which must exist."""
    assert param.grad is not None
    return param.grad
