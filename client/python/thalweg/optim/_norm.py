"""The norm of all gradients of an optimizer together, by which its steps clip."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.optim._plan import Plan


class Norm(NamedTuple):
    """Of gradients that a step has clipped."""

    squares: Any  # their sum, not divided by the square of the scale: one number or a tensor of it
    scale: Any  # likewise; None: 1

    def value(self) -> Tensor:
        root = torch.as_tensor(self.squares, dtype=torch.float64).sqrt()
        return root if self.scale is None else (root / self.scale).reshape(())


class _Kept(NamedTuple):
    squares: Any
    grads: list[Tensor | None]
    versions: list[int]


# Of the check for infinities that precedes a step.
_kept: weakref.WeakKeyDictionary[Optimizer, _Kept] = weakref.WeakKeyDictionary()


def grad_bounds(optimizer: Any) -> list[float]:  # noqa: ANN401
    """For each group the norm that gradients are clipped to; 0: they are not."""
    if hasattr(optimizer, "_grad_bounds"):
        bounds: list[float] = optimizer._grad_bounds()
        return bounds
    return [0.0] * len(optimizer.param_groups)  # torch's own


def keep_squares(optimizer: Optimizer, plan: Plan, squares: Any) -> None:  # noqa: ANN401
    """For the next step, where it clips: the sum of what `plan` has as gradients now."""
    if not any(grad_bounds(optimizer)):
        return
    grads = plan.grads()
    try:
        _kept[optimizer] = _Kept(squares, grads, _versions(grads))
    except RuntimeError:
        return  # made in inference mode, where nobody counts writes


def drop_squares(optimizer: Optimizer) -> Any:  # noqa: ANN401
    """Forgets what has been kept, gradients included; returns the sum, or None."""
    kept = _kept.pop(optimizer, None)
    return None if kept is None else kept.squares


def drop_norm(optimizer: Optimizer) -> None:
    """The latest step has clipped nothing."""
    optimizer.__dict__.pop("_norm", None)


def take_squares(optimizer: Optimizer, plan: Plan) -> Any:  # noqa: ANN401
    """The sum of the squares of all gradients: what was kept, unless gradients have changed since.

    Of one that a hook has written to through `.data`, torch does not say so. Raises NotFusable.
    """
    kept = _kept.pop(optimizer, None)
    if kept is not None:
        grads = plan.grads()
        same = len(grads) == len(kept.grads) and all(map(is_, grads, kept.grads))
        if same and _versions(grads) == kept.versions:
            return kept.squares
    return plan.grad_squares()


def _versions(grads: list[Tensor | None]) -> list[int]:
    return [-1 if grad is None else grad._version for grad in grads]
