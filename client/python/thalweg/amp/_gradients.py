"""Gradients of masters, from those that backward leaves in the parameters they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thalweg.amp._scaler import LossScaler
from thalweg.amp._update import gather, gather_divided, gather_unscaled
from thalweg.optim import _finite
from thalweg.optim._deferred import Deferral, can_defer
from thalweg.optim._norm import drop_squares
from thalweg.optim._plan import known_plan

if TYPE_CHECKING:
    from thalweg._C import BackwardWatch

# Gradients that were deferred in vain are read once more than others: for that many steps they are
# made at once. Who clips them, or adds up those of several backwards, does so in every step.
_STEPS_WITHOUT_DEFERRAL = 8


class MasterGradients:
    """Of one optimizer. Made, or left to a fused step where they are until somebody looks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.params: list[Parameter] = []  # half-precision
        self.weights: list[Parameter] = []  # their masters', which the optimizer updates
        self._optimizer = optimizer
        self._deferral: Deferral | None = None
        self._undeferred = 0  # steps to come in which nothing is deferred
        self._backwards = 0  # since the last step
        self._watch: BackwardWatch | None = None
        self._watched: set[int] = set()  # ids of parameters

    @torch.no_grad()
    def take(self, scaler: LossScaler, done: set[int]) -> None:
        """Adds the parameters' gradients, divided by the scale; notes in it what is not finite.

        `done`: ids of parameters whose masters have theirs already; gets those of the others.
        """
        used = [i for i, p in enumerate(self.params) if p.grad is not None and id(p) not in done]
        done.update(id(self.params[i]) for i in used)
        is_all = len(used) == sum(param.grad is not None for param in self.params)
        if is_all and self._defer(scaler.loss_scale()) and self._find_inf(scaler):
            return
        halves = [grad_of(self.params[i]) for i in used]
        gathered = gather(halves) if scaler.trivial else gather_unscaled(halves, scaler)
        for i, grad in zip(used, gathered, strict=True):
            weight = self.weights[i]
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)

    @torch.no_grad()
    def take_as_they_are(self, *, before_step: bool) -> bool:
        """Has masters have the parameters' gradients and no others; whether there are any.

        `before_step`: the optimizer's step follows.
        """
        self.forget()
        for weight in self.weights:
            weight.grad = None
        has_any = any(param.grad is not None for param in self.params)
        if not (before_step and self._defer(1.0)):
            self._make(1.0)
        return has_any

    def begin(self) -> None:
        """Backward is about to write where gradients may have been left."""
        self._backwards += 1
        self.look()

    def look(self) -> None:
        """Makes gradients that have been left."""
        if self._deferral is not None:
            self._deferral.look()

    def check(self) -> None:
        """Raises RuntimeError if gradients that a step is to read have changed unseen."""
        if self._deferral is not None:
            self._deferral.check()

    def forget(self) -> None:
        """Those that have been left are not used any more."""
        drop_squares(self._optimizer)
        if self._deferral is not None:
            self._deferral.end()
            if self._deferral.was_looked_at:
                self._undeferred = _STEPS_WITHOUT_DEFERRAL
            self._deferral = None

    def clear(self) -> None:
        """They are about to be cleared: those that have been left have to be there for that."""
        if self._deferral is not None and self._deferral.is_intact():
            self._deferral.look()
        self.forget()

    def end_step(self) -> Sequence[Tensor]:
        """After a step: the tensors whose `.grad` it has read, one for each master."""
        was_left = self._deferral is not None and self._deferral.is_active
        self._undeferred = max(0, self._undeferred - 1)
        self.forget()
        if self._backwards > 1:
            self._undeferred = _STEPS_WITHOUT_DEFERRAL
        self._backwards = 0
        return self.params if was_left else self.weights

    def _defer(self, scale: float) -> bool:
        """Leaves gradients to the step, which divides them by `scale`, if it can do that."""
        if (
            not self.weights
            or self._undeferred > 0
            or known_plan(self._optimizer) is None
            or any(weight.grad is not None for weight in self.weights)
            or not can_defer([*self.weights, *self.params], scale)
        ):
            return False
        self._deferral = Deferral(
            self._optimizer,
            self.weights,
            self.params,
            scale=scale,
            watch=self._watch_backward(),
            make=lambda: self._make(scale),
        )
        return True

    def _watch_backward(self) -> BackwardWatch:
        """Of all parameters that a backward may give a gradient."""
        if self._watch is None:
            from thalweg._C import BackwardWatch

            self._watch = BackwardWatch()
        for param in self.params:
            if param.requires_grad and id(param) not in self._watched:
                self._watch.add(param)
                self._watched.add(id(param))
        return self._watch

    def _find_inf(self, scaler: LossScaler) -> bool:
        """Has a dynamic scaler know whether gradients that are left are finite; False: cannot."""
        if not scaler.dynamic:
            return True
        found = _finite.look(self._optimizer)
        if found is None:
            self.forget()
            return False
        scaler.found_inf(found.device).add_(found)
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, scale: float) -> None:
        used = [i for i, param in enumerate(self.params) if param.grad is not None]
        halves = [grad_of(self.params[i]) for i in used]
        gathered = gather(halves) if scale == 1.0 else gather_divided(halves, scale)
        for i, grad in zip(used, gathered, strict=True):
            self.weights[i].grad = grad


def grad_of(param: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad
