"""Computes the norm of all gradients of an optimizer together, by which its steps clip."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.optim._plan import Plan


class Norm(NamedTuple):
    """The norm of the gradients that a step has clipped."""

    # sum of squares, not divided by the square of the scale: a number or a tensor with one
    squares: Any
    scale: Any  # likewise; None: 1

    def value(self) -> Tensor:
        device = self.squares.device if isinstance(self.squares, Tensor) else "cpu"
        root = torch.as_tensor(self.squares, dtype=torch.float64, device=device).sqrt()
        return root if self.scale is None else (root / self.scale).reshape(())


class _Kept(NamedTuple):
    squares: Any
    grads: list[Tensor | None]
    versions: list[int]


# These are the sums of the check for infinities that precedes a step.
_kept: weakref.WeakKeyDictionary[Optimizer, _Kept] = weakref.WeakKeyDictionary()


def grad_bounds(optimizer: Any) -> list[float]:  # noqa: ANN401
    """Returns for each group the norm that gradients are clipped to; 0: no clipping."""
    if hasattr(optimizer, "_grad_bounds"):
        bounds: list[float] = optimizer._grad_bounds()
        return bounds
    return [0.0] * len(optimizer.param_groups)  # the optimizer is torch's own


def keep_squares(optimizer: Optimizer, plan: Plan, squares: Any) -> None:  # noqa: ANN401
    """Keeps, for the next step if it clips, the sum of the present gradients of `plan`."""
    if not any(grad_bounds(optimizer)):
        return
    grads = plan.grads()
    try:
        _kept[optimizer] = _Kept(squares, grads, _versions(grads))
    except RuntimeError:
        return  # made in inference mode, which does not count writes


def drop_squares(optimizer: Optimizer) -> Any:  # noqa: ANN401
    """Drops what has been kept, gradients included; returns the sum, or None."""
    kept = _kept.pop(optimizer, None)
    return None if kept is None else kept.squares


def drop_norm(optimizer: Optimizer) -> None:
    """Records that the latest step has clipped nothing."""
    optimizer.__dict__.pop("_norm", None)


def take_squares(optimizer: Optimizer, plan: Plan) -> Any:  # noqa: ANN401
    """Returns the sum of the squares of all gradients: the kept one, unless gradients have changed.

    Writes by a hook through `.data` are not noticed, because torch does not report them. Raises
    NotFusable.
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
