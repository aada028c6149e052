"""Implements SGD in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.optim._clip import ClippingMixin
from thalweg.optim._fused import refuse_modes
from thalweg.optim._state import hide_steps
from thalweg.optim._steps import sgd_step


class FusedSGD(ClippingMixin, torch.optim.SGD):
    """torch.optim.SGD, fused: 12 bytes per float32 parameter and step, 20 with momentum.

    Arguments, groups and `state_dict` are torch's, and checkpoints can be exchanged with it in both
    directions. Parameters are float32, float16 or bfloat16, on the CPU or one GPU;
    `momentum_buffer` is float32 always. `max_grad_norm`: gradients are clipped as by
    clip_grad_norm_ over all groups, in the step; not part of `state_dict`. Raises RuntimeError for
    foreach and differentiable.
    """

    _fused_step = staticmethod(sgd_step)

    def __init__(  # noqa: PLR0917 - torch's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self.max_grad_norm = max_grad_norm
        refuse_modes(foreach=foreach, capturable=False, differentiable=differentiable)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hide_steps(self)  # copies and pickles have lost it
