"""Float32 masters that an optimizer keeps of its own parameters, as some of apex's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.optim._moments import MomentOptimizer
from thalweg.optim._steps import grad_scale

_MASTER = "master_param"  # in the optimizer's state


class MasterMixin(MomentOptimizer):
    """Updates float32 masters of parameters of `master_types`, and rounds them into these.

    A master is made in the first step that updates its parameter, from the parameter, and is in
    `state_dict`, unlike apex's. If somebody writes into a parameter, its master follows; elements
    that are still the master's rounding keep its precision. With masters, steps are torch's
    multi-tensor operations.
    """

    master_types: tuple[torch.dtype, ...] = ()

    @property
    def _has_masters(self) -> bool:
        params = (param for group in self.param_groups for param in group["params"])
        return bool(self.master_types) and any(p.dtype in self.master_types for p in params)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters by group; None where there is none, or none yet."""
        return [
            {"params": [self.state.get(param, {}).get(_MASTER) for param in group["params"]]}
            for group in self.param_groups
        ]

    def _step_fused(self) -> None:
        if self._has_masters:
            from thalweg._C import NotFusable

            raise NotFusable("thalweg: the optimizer has masters of its own")
        super()._step_fused()

    def _step_unfused(self, reason: RuntimeError) -> None:
        super()._step_unfused(reason)
        if self._has_masters and grad_scale(self) is not None:
            # A master whose parameter has no gradient has not followed it in this step.
            self._versions = {**self._versions_seen(), **self._updated_versions()}

    def _weight(self, param: Tensor, held: Tensor) -> Tensor:
        if param.dtype not in self.master_types:
            return super()._weight(param, held)
        state = self.state[param]
        master: Tensor | None = state.get(_MASTER)
        if master is None:
            master = state[_MASTER] = held.detach().to(torch.float32, copy=True)
        elif self._versions_seen().get(id(param)) != param._version:
            kept = master.to(param.dtype) == held
            master.copy_(torch.where(kept, master, held.float()))
        return master

    def _versions_seen(self) -> dict[int, int]:
        seen: dict[int, int] = self.__dict__.get("_versions", {})
        return seen

    def _updated_versions(self) -> dict[int, int]:
        params: list[Any] = [param for group in self.param_groups for param in group["params"]]
        return {id(param): param._version for param in params if param.grad is not None}
