"""Implements apex's FusedNovoGrad, FusedAdagrad and FusedMixedPrecisionLamb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from thalweg.compat._apex_masters import MasterMixin
from thalweg.compat._apex_optimizers import refuse
from thalweg.compat._apex_updates import update_by_adagrad, update_by_novograd
from thalweg.optim._fused import FusedMixin
from thalweg.optim._moments import refuse_unusable
from thalweg.optim._settings import SettingsMixin
from thalweg.optim._state import load_and_restore
from thalweg.optim.lamb import LAMB

__all__ = ["FusedAdagrad", "FusedMixedPrecisionLamb", "FusedNovoGrad"]


class _ByTensor(SettingsMixin, Optimizer):
    """Updates each parameter in float32 by torch's operations, and rounds it."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:  # noqa: ANN401
        self._set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is Optimizer.add_param_group; raises ValueError for a group with `maximize`."""
        refuse(type(self).__name__, maximize=bool(param_group.get("maximize")))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Updates once; returns what `closure` returns.

        Raises RuntimeError for sparse and complex gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_unusable(self)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                wide = torch.promote_types(param.dtype, torch.float32)
                weight = param.to(wide, copy=True)
                self._update(group, self.state[param], weight, param.grad.to(wide))
                param.copy_(weight)
        return loss

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor
    ) -> None:
        """Writes the new values into `weight`."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Is Optimizer.load_state_dict, but state keeps its type whatever the parameters are."""
        load_and_restore(self, super().load_state_dict, state_dict, _restore)


def _restore(optimizer: Optimizer, source: dict[str, Any]) -> None:
    """Takes the state from `source` again: torch has rounded it to the parameters' type."""
    saved = [i for group in source["param_groups"] for i in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in zip(saved, params, strict=True):
        for key, value in source["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[param][key] = value.to(param.device, copy=True)


class FusedNovoGrad(_ByTensor):
    """NovoGrad (Ginsburg et al., 2019): gradients divided by a running norm of their tensor.

    With n the norm of the gradient g, c1 = 1-β1^t and c2 = √(1-β2^t), or 1 without
    `bias_correction`, in float32:

        v = √(β2·v² + (1-β2)·n²), or β2·v + (1-β2)·n for the maximum norm; v starts as the first n
        m = β1·m + (1-β1)·g;  p -= lr·((m/c1) / (v/c2 + ε) + λp)
        reg_inside_moment: m = β1·m + (1-β1)·(g / (v/c2 + ε) + λp);  p -= lr·m/c1

    The state is `step`, `exp_avg` and `exp_avg_sq` (v) of each parameter; apex has steps and norms
    by group, so checkpoints of apex do not fit. bfloat16 and float64 parameters are updated too.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as in Adam; λ is `weight_decay`.
        amsgrad: False.
        reg_inside_moment: see above.
        grad_averaging: False: 1 in the place of 1-β1.
        norm_type: 2, or 0 for the maximum.
        init_zero: v starts as 0.
        set_grad_none: what zero_grad() does by default.
    """

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse("FusedNovoGrad", amsgrad=amsgrad)
        if norm_type not in (0, 2):
            raise ValueError(f"norm_type is {norm_type}, expected 2, or 0 for the maximum")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "reg_inside_moment": reg_inside_moment,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor
    ) -> None:
        update_by_novograd(group, state, weight, grad)


class FusedAdagrad(_ByTensor):
    """Adagrad: h += g², p -= lr·g/(√h + ε), in float32.

    `weight_decay` λ is added to g as λp, or with `adagrad_w_mode` to the update. The state is `sum`
    (h), in float32 also for half-precision parameters, whose h apex keeps in their type.
    """

    _settings = (*_ByTensor._settings, "adagrad_w_mode")

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor
    ) -> None:
        update_by_adagrad(group, state, weight, grad, decoupled=self.adagrad_w_mode)


class FusedMixedPrecisionLamb(MasterMixin, LAMB):
    """thalweg.optim.LAMB with float32 masters of the parameters of `reduced_precision_dtype`.

    A group may have parameters of several types. `step` counts by parameter, beginning with the
    argument `step`; apex counts by group. See MasterMixin for the masters.
    """

    _settings = (*LAMB._settings, "master_types")

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        refuse("FusedMixedPrecisionLamb", amsgrad=amsgrad)
        self.master_types = () if reduced_precision_dtype is None else (reduced_precision_dtype,)
        super().__init__(
            params,
            lr,
            weight_decay,
            betas,
            eps,
            adam_w_mode,
            grad_averaging,
            True,
            max_grad_norm,
            bias_correction=bias_correction,
            use_nvlamb=use_nvlamb,
        )
        if step:
            for param in [p for group in self.param_groups for p in group["params"]]:
                self.state[param] = {
                    "step": torch.tensor(float(step), device="cpu"),
                    "exp_avg": torch.zeros_like(param, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(param, dtype=torch.float32),
                }

    def step(
        self, closure: Callable[[], Any] | None = None, grad_scaler: GradScaler | None = None
    ) -> Any:  # noqa: ANN401
        """Updates once; `grad_scaler`: divide gradients by its scale, unless its unscale_() has,
        or skip if they are not finite.
        """
        if grad_scaler is None:
            return self._step(closure)
        known = grad_scaler._per_optimizer_states[id(self)]
        is_divided = known["stage"] is OptState.UNSCALED
        found = known["found_inf_per_device"] if is_divided else {}
        found = found or grad_scaler._check_inf_per_device(self)
        scale = grad_scaler._get_scale_async()
        assert scale is not None  # the check would have raised
        self.grad_scale = torch.ones_like(scale) if is_divided else scale
        self.found_inf = sum(flag.to(scale.device) for flag in found.values())
        try:
            return self._step(closure)
        finally:
            del self.grad_scale, self.found_inf

    def _step(self, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401
        # This class's step runs hooks, and so does LAMB.step once there has been a LAMB.
        return FusedMixin.step(self, closure)
