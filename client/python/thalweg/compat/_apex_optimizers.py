"""Implements `apex.optimizers`: apex's signatures and defaults, computed by thalweg.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.optim._moments import Batch, MomentOptimizer, adam_updates, subtract
from thalweg.optim._steps import adam_step
from thalweg.optim.lamb import LAMB

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


class FusedAdam(MomentOptimizer):
    """Adam with the weight decay of AdamW (`adam_w_mode`) or of L2; moments in float32.

    The arguments are apex's. `capturable`, `master_weights` and `amsgrad` are refused if set.
    """

    _fused_step = staticmethod(adam_step)

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        _refuse("FusedAdam", amsgrad=amsgrad, capturable=capturable, master_weights=master_weights)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
            "maximize": False,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _update(self, group: dict[str, Any], batch: Batch, norm: Tensor | None) -> None:
        subtract(batch, adam_updates(group, batch, 1 - group["betas"][0]), group["lr"])


class FusedLAMB(LAMB):
    """thalweg.optim.LAMB with the order of arguments and the defaults of apex."""

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse("FusedLAMB", amsgrad=amsgrad)
        super().__init__(
            params,
            lr,
            weight_decay,
            betas,
            eps,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            bias_correction=bias_correction,
            use_nvlamb=use_nvlamb,
        )


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD with apex's arguments; `wd_after_momentum` is refused if set."""

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        _refuse("FusedSGD", wd_after_momentum=wd_after_momentum)
        self._set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients; with `set_to_none` None it does what `set_grad_none` says."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


def _refuse(optimizer: str, **options: bool) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"{optimizer} has no {name}, expected False: leave it out")
