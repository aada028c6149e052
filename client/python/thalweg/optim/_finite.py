"""GradScaler's question whether gradients are finite, answered by reading them.

Torch asks by multiplying them by 1, which writes each again. A ShardedGradScaler's ranks, of which
each has a part of the gradients, get the same answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from thalweg._torch import _patches
from thalweg.optim._norm import keep_squares
from thalweg.optim._plan import known_plan


def install() -> None:
    """Replaces methods of GradScaler; for optimizers without a plan the first does what it did."""
    _patches.install("finite", GradScaler, "_unscale_grads_", _unscale_or_look)
    _patches.install("finite", GradScaler, "_check_inf_per_device", _check_on_all_ranks)


def _unscale_or_look(  # noqa: PLR0917 - torch's order
    unscale: Callable[..., dict[torch.device, Tensor]],
    scaler: GradScaler,
    /,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    # Allowed only before a step that divides by itself: `inv_scale` is 1 then.
    if allow_fp16 and (found := look(optimizer)) is not None:
        return {found.device: found}
    return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)


def _check_on_all_ranks(
    check: Callable[..., dict[torch.device, Tensor]],
    scaler: GradScaler,
    /,
    optimizer: Optimizer,
) -> dict[torch.device, Tensor]:
    """Does for steps that divide by themselves what ShardedGradScaler.unscale_() does for others.

    It is a collective of the scaler's ranks.
    """
    found = check(scaler, optimizer)
    # It is not imported here: a program that has such a scaler has imported it.
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    if module is None or not isinstance(scaler, module.ShardedGradScaler):
        return found
    for own in found.values():
        total = own.to(scaler._device)  # where the scale is, and where the group's back end works
        dist.all_reduce(total, group=scaler.process_group)
        own.copy_(total)
    return found


@torch.no_grad()
def look(optimizer: Optimizer) -> Tensor | None:
    """1 if a gradient of the next step is not finite, else 0, where gradients are.

    None: that can only be found otherwise.
    """
    from thalweg._C import NotFusable

    has_grads = (p.grad is not None for group in optimizer.param_groups for p in group["params"])
    plan = known_plan(optimizer)
    # Of DTensors all processes have to hear, which torch sees to.
    if plan is None or plan.has_dtensors or not any(has_grads):
        return None
    try:
        squares = plan.grad_squares()
    except NotFusable:
        return None
    keep_squares(optimizer, plan, squares)
    if isinstance(squares, Tensor):
        return squares.isfinite().logical_not().float()
    return torch.tensor(float(not math.isfinite(squares)), device="cpu")
