"""Implements `apex.parallel.LARC`: a learning rate in proportion to each parameter's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from thalweg.amp._optimizer import mixed_optimizer_of

__all__ = ["LARC"]


class LARC(Optimizer):
    """Wraps an optimizer and gives each parameter p a rate of its own (You et al., 2017).

    Before the step the gradient g becomes a·(g + λp), with λ the `weight_decay` of the group, which
    the optimizer does not see then, and a = trust_coefficient·‖p‖/(‖g‖ + λ‖p‖ + eps); with `clip`,
    a is min(a/lr, 1). Where one of the norms is 0, g stays as it is. As in apex, `.grad` is written
    to. Unlike apex's, it is an Optimizer, so that schedulers and `initialize` take it; norms are
    summed in float64, and `step` takes a closure.

    Args:
        optimizer: any; all that is not said above is its own.
        trust_coefficient, clip, eps: see above.
    """

    # GradScaler divides gradients before the step: norms are of those.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Optimizer.__init__ is left out: groups, state and hooks are those of `optimizer`.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "optim":  # while being unpickled or copied
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads it into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Changes gradients as said above, then takes the optimizer's step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._catch_up()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0
                self._adapt(group, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return loss

    def _catch_up(self) -> None:
        """Prepares masters, as hooks of the optimizer's own step would do later."""
        for optimizer in (self, self.optim):
            mixed = mixed_optimizer_of(optimizer)
            if mixed is not None:
                mixed.catch_up()

    @torch.no_grad()
    def _adapt(self, group: dict[str, Any], decay: float) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        grads = [param.grad for param in params]
        of_params = torch._foreach_norm(params, 2, dtype=torch.float64)
        of_grads = torch._foreach_norm(grads, 2, dtype=torch.float64)
        for param, grad, size, slope in zip(params, grads, of_params, of_grads, strict=True):
            rate = self.trust_coefficient * size / (slope + decay * size + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp_max(1.0)
            moves = (size != 0) & (slope != 0)
            grad.add_(param.to(grad.dtype) * moves, alpha=decay)
            grad.mul_(torch.where(moves, rate, 1.0).to(grad.dtype))
