"""GradScaler's question whether gradients are finite, answered by reading them.

Torch asks by multiplying them by 1, which writes each again.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from thalweg.optim._copies import copies_of, has_grad
from thalweg.optim._norm import keep_squares
from thalweg.optim._plan import known_plan


@functools.cache
def install() -> None:
    """Wraps a method of GradScaler; for optimizers without a plan it does what it did."""
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_or_look(
        self: GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # Allowed only before a step that divides by itself: `inv_scale` is 1 then.
        if allow_fp16 and (found := look(optimizer)) is not None:
            return {found.device: found}
        return unscale(self, optimizer, inv_scale, found_inf, allow_fp16)

    GradScaler._unscale_grads_ = unscale_or_look  # type: ignore[method-assign]


@torch.no_grad()
def look(optimizer: Optimizer) -> Tensor | None:
    """1 if a gradient of the next step is not finite, else 0, where gradients are.

    None: that can only be found otherwise.
    """
    from thalweg._C import NotFusable

    copies = copies_of(optimizer)
    grads = (has_grad(p, copies) for group in optimizer.param_groups for p in group["params"])
    plan = known_plan(optimizer)
    # Of DTensors all processes have to hear, which torch sees to.
    if plan is None or plan.has_dtensors or not any(grads):
        return None
    try:
        squares = plan.grad_squares()
    except NotFusable:
        return None
    keep_squares(optimizer, plan, squares)
    if isinstance(squares, Tensor):
        return squares.isfinite().logical_not().float()
    return torch.tensor(float(not math.isfinite(squares)))
