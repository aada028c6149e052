"""Loss scaling: losses are multiplied so that small gradients survive in float16.

`ScaleRule` says how a scale changes, and `LossScaler` is one loss's scale. `gather_unscaled` and
`unscale` divide gradients by it and notice those that are not finite; `_optimizer.py` skips the
step then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg._torch._precision import tell

# The smallest scale whose inverse is a float32. It is the floor where none is given, so that a
# scale never becomes 0.
SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class ScaleRule:
    """A ScaleRule says how a loss scale starts and changes.

    A dynamic scale starts at `init_scale` (at most `max_loss_scale`). It is divided by
    `scale_factor` when gradients are not finite, but not below `min_loss_scale`, and multiplied by
    it after `scale_window` updates in a row that were finite, but not above `max_loss_scale`. A
    scale that is a number never changes, and no step is skipped because of it.
    """

    loss_scale: float | str = "dynamic"
    init_scale: float = 2.0**16
    scale_factor: float = 2.0
    scale_window: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24

    @property
    def dynamic(self) -> bool:
        """Returns whether the scale changes."""
        return self.loss_scale == "dynamic"

    @property
    def floor(self) -> float:
        """The smallest value of a dynamic scale."""
        return SMALLEST_SCALE if self.min_loss_scale is None else self.min_loss_scale

    def initial(self) -> float:
        """Returns the scale of the first loss."""
        if self.dynamic:
            return min(self.init_scale, self.max_loss_scale)
        return float(self.loss_scale)

    def lowered(self, scale: float) -> float:
        """Returns the dynamic scale that follows `scale` after an overflow."""
        return max(scale / self.scale_factor, self.floor)

    def raised(self, scale: float) -> float:
        """Returns the dynamic scale that follows `scale` after `scale_window` finite updates."""
        return min(scale * self.scale_factor, self.max_loss_scale)


class LossScaler:
    """The scale of one loss, static or dynamic; `ScaleRule` explains the arguments."""

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        loss_scale: float | str = "dynamic",
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self._rule = ScaleRule(
            loss_scale, init_scale, scale_factor, scale_window, min_loss_scale, max_loss_scale
        )
        self._loss_scale = self._rule.initial()  # scripts for apex read and write it
        self._found: dict[torch.device, Tensor] = {}
        self._unskipped = 0
        self._has_overflow = False
        # Their gradients, perhaps of further losses, were divided with those of this one.
        self._joined: list[BackwardPass] = []

    @property
    def dynamic(self) -> bool:
        """Returns whether the scale changes."""
        return self._rule.dynamic

    @property
    def unskipped(self) -> int:
        """The number of updates since the scale last changed."""
        return self._unskipped

    def loss_scale(self) -> float:
        """Returns the factor for the next loss."""
        return self._loss_scale

    @property
    def trivial(self) -> bool:
        """Returns whether gradients need neither a division nor a check."""
        return not self.dynamic and self._loss_scale == 1.0

    def found_inf(self, device: torch.device) -> Tensor:
        """Returns a float32 scalar on `device`; the next update is an overflow if it is not 0."""
        if device not in self._found:
            self._found[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._found[device]

    def join(self, passes: Sequence[BackwardPass]) -> None:
        """Notes that gradients of these passes are divided together with those of its own loss.

        Which of them has overflowed cannot be told, so the next update is one for all.
        """
        self._joined += passes

    def update_scale(self) -> bool:
        """Adjusts the scale, and those that have joined, to what was found since the last update.

        This waits for the devices, except with a static scale.

        Returns:
            Whether the step has to be skipped.
        """
        skip = self._is_found()
        self._follow(skip, is_told=skip)
        others = dict.fromkeys(one.scaler for one in self._joined if one.learns(skip))
        self._joined = []
        for other in others:
            if other is not self:
                other._follow(skip, is_told=False)
        return skip

    def _is_found(self) -> bool:
        """Returns whether the step has to be skipped, and forgets what was found."""
        found = self._found
        self._found = {}
        return self.dynamic and any(flag.item() for flag in found.values())

    def _follow(self, skip: bool, *, is_told: bool) -> None:
        """Counts a finite update, or lowers the scale; `is_told`: sidecars count a skipped step."""
        self._has_overflow = skip
        if self.dynamic and skip:
            self._loss_scale = self._rule.lowered(self._loss_scale)
            self._unskipped = 0
        elif self.dynamic:
            self._unskipped += 1
            if self._unskipped >= self._rule.scale_window:
                self._loss_scale = self._rule.raised(self._loss_scale)
                self._unskipped = 0
        if not self.trivial:
            tell(self, self._loss_scale, skipped=is_told)

    def state_dict(self) -> dict[str, float]:
        """Returns `loss_scale` and `unskipped`, the updates since the scale last changed."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned; raises KeyError if a part is missing."""
        self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])


class BackwardPass:
    """A backward pass under a loss's scale, whose gradients one or more optimizers divide."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._known: bool | None = None  # whether there was an overflow, as far as is known

    def learns(self, skip: bool) -> bool:
        """Returns whether an optimizer's update tells what none before it has: that there was one,
        or that it was an overflow.
        """
        is_new = self._known is None or skip > self._known
        self._known = skip or bool(self._known)
        return is_new


# The functions below expect that the caller has disabled autograd.


def gather(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns float32 copies of half-precision gradients; sparse ones stay sparse."""
    gathered = [torch.empty(0) if g.is_sparse else _empty_float(g) for g in grads]
    dense = [i for i, g in enumerate(grads) if not g.is_sparse]
    if dense:
        torch._foreach_copy_([gathered[i] for i in dense], [grads[i] for i in dense])
    for i, grad in enumerate(grads):
        if grad.is_sparse:
            gathered[i] = grad.coalesce().float()
    return gathered


def gather_unscaled(
    grads: Sequence[Tensor], scaler: LossScaler, memory: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    """Does gather() and unscale(), in one pass where gradients are dense and on the CPU.

    That pass uses tensors of `memory` that nothing else refers to again.
    """
    if not grads:
        return []
    from thalweg._C import NotFusable, unscaled_grads  # loaded only once there is a gradient

    try:
        gathered, is_finite = unscaled_grads(list(grads), scaler.loss_scale(), list(memory))
    except NotFusable:
        gathered = gather(grads)
        unscale(gathered, scaler)
        return gathered
    if scaler.dynamic and not is_finite:
        scaler.found_inf(torch.device("cpu")).fill_(1.0)
    return gathered


def unscale(grads: Sequence[Tensor], scaler: LossScaler) -> None:
    """Divides gradients by the scale, in place.

    With a dynamic scale, `scaler.found_inf` notes that one is not finite.
    """
    if scaler.trivial:
        return
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        alike[values.device, values.dtype].append(values)
    for (device, _), tensors in alike.items():
        if scaler.dynamic:
            inverse = torch.full((), 1.0 / scaler.loss_scale(), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                tensors, scaler.found_inf(device), inverse
            )
        else:
            torch._foreach_mul_(tensors, 1.0 / scaler.loss_scale())


def _empty_float(grad: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=torch.float32)


def unshared(grad: Tensor) -> Tensor:
    """Returns `grad`, or a copy if it lies in a bucket of DistributedDataParallel.

    Buckets are written again by the next backward.
    """
    return grad.clone() if grad._is_view() else grad
