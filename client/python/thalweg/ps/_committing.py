"""The end of a step whose gradients are looked at as a whole: loss scales and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thalweg.ps._rules import Group, own_bound
from thalweg.ps._serving import Serving


class Committing:
    """What is known of a step's gradients before shards may update."""

    def __init__(self, serving: Serving, max_grad_norm: float | None) -> None:
        self.max_grad_norm = max_grad_norm
        self.norm: float | None = None  # of the latest step that had one, before clipping
        self._serving = serving
        self._unscaled_by: float | None = None  # what unscale_() has been told in this step
        self._bound: float | None = None  # of this step alone

    def forget_step(self) -> None:
        """The step has ended without an update, and without being finished."""
        self._unscaled_by = self._bound = None

    def look_for_infinities(self, groups: Sequence[Group], inverse_scale: float) -> bool:
        """Notes what the step is to multiply gradients by. Returns whether one is not finite."""
        self._unscaled_by = 1 / inverse_scale
        return self._serving.look(groups).nonfinite > 0

    def clip(self, groups: Sequence[Group], bound: float) -> float:
        """Lets this step clip to `bound`, too. Returns the norm after earlier calls."""
        if self._unscaled_by is None and not self._is_scale(1.0):
            self._serving.fail(
                f"gradients carry a loss scale of {self._serving.loss_scale:g}: call "
                "scaler.unscale_(optimizer) before clipping"
            )
        norm = math.sqrt(self._serving.look(groups).squares) / (self._unscaled_by or 1.0)
        before, self._bound = self._bound, min(bound, self._bound or bound)
        return min(norm, before or norm)

    def finish_step(
        self, groups: Sequence[Group], given_scale: float | None, *, is_finite: bool
    ) -> bool:
        """Lets the shards update, or not; returns which. `given_scale` is what GradScaler has given
        to step().
        """
        told, self._unscaled_by = given_scale or self._unscaled_by, None
        bounds = (self._bound, self.max_grad_norm, own_bound(groups))
        bound, self._bound = min(filter(None, bounds), default=0.0), None
        if told is None and not self._is_scale(1.0):
            self._serving.fail(
                f"gradients carry a loss scale of {self._serving.loss_scale:g}, but step() does "
                "not know it: call scaler.step(optimizer)"
            )
        scale = told or 1.0
        if bound:
            self.norm = math.sqrt(self._serving.look(groups).squares) / scale
        if is_finite:
            self._serving.finish_step(groups, grad_scale=scale, max_grad_norm=bound)
        else:
            self._serving.skip_step()
        return is_finite

    def _is_scale(self, scale: float) -> bool:
        return math.isclose(scale, self._serving.loss_scale, rel_tol=1e-6)
