"""Loss scaling: multiply the loss by a power of two, so that small gradients survive in float16."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg._precision import tell

# Where no floor is given: the smallest scale whose inverse is a float32, so that it is never 0.
SMALLEST_SCALE = 2.0**-126


class LossScaler:
    """One loss's scale: static, or dynamic.

    A dynamic scale starts at `init_scale` (at most `max_loss_scale`), is divided by `scale_factor`
    when gradients are not finite, not below `min_loss_scale`, and multiplied by it after
    `scale_window` updates in a row that were finite, not above `max_loss_scale`. A static scale
    never changes, and never has a step skipped.
    """

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        loss_scale: float | str = "dynamic",
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._scale = min(init_scale, max_loss_scale) if self.dynamic else float(loss_scale)
        self._factor = scale_factor
        self._window = scale_window
        self._min = SMALLEST_SCALE if min_loss_scale is None else min_loss_scale
        self._max = max_loss_scale
        self._found: dict[torch.device, Tensor] = {}
        self.unskipped = 0

    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self._scale

    @property
    def trivial(self) -> bool:
        """Whether gradients need neither a division nor a look at them."""
        return not self.dynamic and self._scale == 1.0

    def found_inf(self, device: torch.device) -> Tensor:
        """float32 scalar on `device`; what makes it non-zero makes the next update an overflow."""
        if device not in self._found:
            self._found[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._found[device]

    def update_scale(self) -> bool:
        """Adjusts the scale to what was found since the last update; whether to skip the step.

        Waits for the devices. A static scale does not look.
        """
        skip = self._decide()
        if not self.trivial:
            tell(self, self._scale, skipped=skip)
        return skip

    def _decide(self) -> bool:
        found = self._found
        self._found = {}
        if not self.dynamic:
            return False
        if any(flag.item() for flag in found.values()):
            self._scale = max(self._scale / self._factor, self._min)
            self.unskipped = 0
            return True
        self.unskipped += 1
        if self.unskipped == self._window:
            self._scale = min(self._scale * self._factor, self._max)
            self.unskipped = 0
        return False

    def state_dict(self) -> dict[str, float]:
        """`loss_scale` and `unskipped`, the updates since the scale last changed."""
        return {"loss_scale": self._scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what `state_dict` gave; raises KeyError if it lacks something."""
        self._scale = float(state["loss_scale"])
        self.unskipped = int(state["unskipped"])


class StaticLossScaler:
    """`fp16_utils.LossScaler`: a constant factor, never an overflow."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The factor."""
        return self.cur_scale

    def has_overflow(self, params: object) -> bool:
        """False: gradients are not looked at."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leaves the factor as it is."""
        if self.cur_scale != 1.0:
            tell(self, self.cur_scale, skipped=False)

    def scale_gradient(
        self, module: object, grad_in: tuple[Tensor | None, ...], grad_out: object
    ) -> tuple[Tensor | None, ...]:
        """As a backward hook of a module: its input gradients times the factor."""
        return tuple(None if grad is None else grad * self.loss_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(StaticLossScaler):
    """`fp16_utils.DynamicLossScaler`: divided on overflow, down to 1, multiplied every so often."""

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: object) -> bool:
        """Whether a gradient of `params`, an iterable of tensors, is not finite."""
        grads = [p.grad for p in params if p.grad is not None]  # type: ignore[attr-defined]
        return any(not bool(torch.isfinite(_values(grad)).all()) for grad in grads)

    def update_scale(self, overflow: bool) -> None:
        """Divides after an overflow; multiplies when `scale_window` updates had none."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
        tell(self, self.cur_scale, skipped=overflow)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
