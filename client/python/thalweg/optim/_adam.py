"""Implements Adam and AdamW in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.optim._clip import ClippingMixin
from thalweg.optim._fused import refuse_modes
from thalweg.optim._steps import adam_step


class FusedAdam(ClippingMixin, torch.optim.Adam):
    """torch.optim.Adam, fused: 28 bytes per float32 parameter and step (docs/optim.md).

    Arguments, groups and `state_dict` are torch's, and checkpoints can be exchanged with it in both
    directions. Parameters are float32, float16 or bfloat16, on the CPU or one GPU; `exp_avg`,
    `exp_avg_sq` and `max_exp_avg_sq` are float32 always. `max_grad_norm`: gradients are clipped as
    by clip_grad_norm_ over all groups, in the step; not part of `state_dict`. Raises RuntimeError
    for foreach, capturable and differentiable.
    """

    _fused_step = staticmethod(adam_step)

    def __init__(  # noqa: PLR0917 - torch's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.max_grad_norm = max_grad_norm
        refuse_modes(foreach=foreach, capturable=capturable, differentiable=differentiable)


class FusedAdamW(ClippingMixin, torch.optim.AdamW):
    """torch.optim.AdamW, fused; everything that FusedAdam's docstring says applies."""

    _fused_step = staticmethod(adam_step)

    def __init__(  # noqa: PLR0917 - torch's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.max_grad_norm = max_grad_norm
        refuse_modes(foreach=foreach, capturable=capturable, differentiable=differentiable)
