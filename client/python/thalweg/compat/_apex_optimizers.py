"""Implements `apex.optimizers`: apex's signatures and defaults, computed by thalweg.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thalweg.amp._masters import HALF_TYPES
from thalweg.compat._apex_masters import MasterMixin
from thalweg.compat._apex_multi_tensor_steps import multi_tensor_sgd
from thalweg.optim._counts import fallbacks
from thalweg.optim._fused import FusedMixin
from thalweg.optim._moments import Batch, adam_updates, refuse_unusable, subtract
from thalweg.optim._refusals import remembered_refusals
from thalweg.optim._settings import SettingsMixin
from thalweg.optim._shards import local_grad, local_of, local_state
from thalweg.optim._state import hide_steps
from thalweg.optim._steps import adam_step, grad_scale, sgd_step
from thalweg.optim.lamb import LAMB

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


class FusedAdam(MasterMixin):
    """Adam with the weight decay of AdamW (`adam_w_mode`) or of L2; moments in float32.

    The arguments are apex's. With `capturable`, `lr` of each group is a tensor, from which the step
    reads it; unlike apex's, the step refuses CUDA graphs, but never waits for a GPU either. With
    `master_weights`, half-precision parameters have float32 masters (see MasterMixin); they do not
    need `capturable`. After a step under GradScaler `.grad` is unscaled, as after torch's own
    optimizers. `amsgrad` is refused if set.
    """

    _fused_step = staticmethod(adam_step)
    _settings = (*MasterMixin._settings, "capturable", "master_weights", "master_types")

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
        refuse("FusedAdam", amsgrad=amsgrad)
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_types = HALF_TYPES if master_weights else ()
        if capturable:
            lr = torch.as_tensor(lr, dtype=torch.float32)
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is Optimizer.add_param_group; with `capturable`, each group has a tensor as `lr`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device).clone()

    def _update(self, group: dict[str, Any], batch: Batch, norm: Tensor | None) -> None:
        subtract(batch, adam_updates(group, batch, 1 - group["betas"][0]), group["lr"])


class FusedLAMB(LAMB):
    """thalweg.optim.LAMB with the order of arguments and the defaults of apex.

    After a step under GradScaler `.grad` is unscaled, as after torch's own optimizers.
    """

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
        refuse("FusedLAMB", amsgrad=amsgrad)
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


class FusedSGD(FusedMixin, SettingsMixin, torch.optim.SGD):
    """SGD with apex's arguments, fused as thalweg.optim.FusedSGD; `momentum_buffer` in float32.

    With `wd_after_momentum` decay λ is added to the step, not to the momentum b: p -= lr·(b + λp),
    Nesterov lr·(g + μb + λp), by torch's multi-tensor operations, as for float64 parameters. After
    a step under GradScaler `.grad` is unscaled, as after torch's own optimizers. `lr` may be left
    out if all groups have one. `materialize_master_grads` changes nothing: masters have gradients.
    Sparse gradients are refused with RuntimeError.
    """

    _fused_step = staticmethod(sgd_step)
    _settings = (
        *SettingsMixin._settings,
        *("wd_after_momentum", "materialize_master_grads", "_needs_lr"),
    )

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self._set_grad_none = set_grad_none
        self._needs_lr = lr is None
        super().__init__(
            params, 0.0 if lr is None else lr, momentum, dampening, weight_decay, nesterov
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is Optimizer.add_param_group; raises ValueError if there is no `lr` at all."""
        if self._needs_lr and "lr" not in param_group:
            raise ValueError("a group has no lr, expected one in each group or an argument lr")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        hide_steps(self)  # copies and pickles have lost it

    def _step_fused(self) -> None:
        with remembered_refusals(self):
            if self.wd_after_momentum:
                from thalweg._C import NotFusable

                raise NotFusable("thalweg: wd_after_momentum is set")
            super()._step_fused()

    def _step_unfused(self, reason: RuntimeError) -> None:
        scale = grad_scale(self)
        if scale is None:
            return
        refuse_unusable(self)
        for group in self.param_groups:
            used = [param for param in group["params"] if param.grad is not None]
            new = [param for param in used if "momentum_buffer" not in self.state[param]]
            if group["momentum"] != 0:
                for param in new:
                    buffer = torch.zeros_like(param, dtype=torch.float32)
                    self.state[param]["momentum_buffer"] = buffer
            known = set(map(id, used)) - set(map(id, new))
            self._update(group, [p for p in used if id(p) in known], scale, is_first=False)
            self._update(group, new, scale, is_first=True)
        fallbacks[str(reason).removeprefix("thalweg: ")] += 1

    def _update(
        self, group: dict[str, Any], params: list[Tensor], scale: float, *, is_first: bool
    ) -> None:
        """Updates some parameters of a group, of DTensors this process's part."""
        if not params:
            return
        momenta = [
            local_state(p, self.state[p]["momentum_buffer"]) for p in params if group["momentum"]
        ]
        multi_tensor_sgd(
            1,
            torch.zeros(1, device="cpu"),
            [list(map(local_grad, params)), list(map(local_of, params)), momenta],
            group["weight_decay"],
            group["momentum"],
            group["dampening"],
            float(group["lr"]),
            group["nesterov"],
            is_first,
            self.wd_after_momentum,
            (-1 if group["maximize"] else 1) / scale,
        )
        increment_version(params)  # DTensors do not notice writes to their parts


def refuse(optimizer: str, **options: bool) -> None:
    """Raises ValueError for the first option that is set."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{optimizer} has no {name}, expected False: leave it out")
