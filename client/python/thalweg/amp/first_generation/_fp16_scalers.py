"""The loss scalers of apex's fp16_utils, which scripts call by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg._torch._precision import carry, tell


class StaticLossScaler:
    """`fp16_utils.LossScaler`: a constant factor under which nothing overflows."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self.cur_scale

    def has_overflow(self, params: object) -> bool:
        """Returns False: gradients are not checked."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leaves the factor as it is."""
        if self.cur_scale != 1.0:
            tell(self, self.cur_scale, skipped=False)

    def scale_gradient(
        self, module: object, grad_in: tuple[Tensor | None, ...], grad_out: object
    ) -> tuple[Tensor | None, ...]:
        """Serves as a module's backward hook, which multiplies its input gradients."""
        return tuple(None if grad is None else grad * self.loss_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward of the scaled loss."""
        scaled = loss * self.loss_scale
        if self.cur_scale != 1.0:
            carry(scaled, self, self.cur_scale)
        scaled.backward(retain_graph=retain_graph)


class DynamicLossScaler(StaticLossScaler):
    """`fp16_utils.DynamicLossScaler`: a factor that overflows lower, down to 1."""

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: object) -> bool:
        """Returns whether a gradient of `params`, an iterable of tensors, is not finite."""
        grads = [p.grad for p in params if p.grad is not None]  # type: ignore[attr-defined]
        return any(not bool(torch.isfinite(_values(grad)).all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Divides after an overflow; multiplies after `scale_window` updates without one."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
        tell(self, self.cur_scale, skipped=overflow)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
