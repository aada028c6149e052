"""Implements the formulas of NovoGrad and Adagrad, for optimizers and for `amp_C`'s functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def update_by_novograd(
    group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor
) -> None:
    """Writes new values into `weight` and a state that may be empty; see FusedNovoGrad."""
    beta1, beta2 = group["betas"]
    is_max = group["norm_type"] == 0
    order = float("inf") if is_max else 2
    # torch's sums of squares in float32 lose digits in large tensors.
    norm = torch.linalg.vector_norm(grad, order, dtype=torch.float64).to(grad.dtype)
    if not state:
        state["step"] = torch.tensor(0.0, device="cpu")
        state["exp_avg"] = torch.zeros_like(grad)
        state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
    state["step"] += 1
    average, old = state["exp_avg"], state["exp_avg_sq"]
    if is_max:
        old.mul_(beta2).add_(norm, alpha=1 - beta2)
    else:
        old.copy_((beta2 * old.square() + (1 - beta2) * norm.square()).sqrt())
    step = float(state["step"]) if group["bias_correction"] else float("inf")
    first, second = 1 - beta1**step, (1 - beta2**step) ** 0.5
    divisor = old / second + group["eps"]
    if group["reg_inside_moment"]:
        grad = grad / divisor + group["weight_decay"] * weight
    average.mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    update = average / first
    if not group["reg_inside_moment"]:
        update = update / divisor + group["weight_decay"] * weight
    weight.sub_(group["lr"] * update)


def update_by_adagrad(
    group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor, *, decoupled: bool
) -> None:
    """Writes new values into `weight` and a state that may be empty; see FusedAdagrad."""
    if not state:
        state["sum"] = torch.zeros_like(grad)
    if not decoupled:
        grad = grad + group["weight_decay"] * weight
    state["sum"].addcmul_(grad, grad)
    update = grad / (state["sum"].sqrt() + group["eps"])
    if decoupled:
        update = update + group["weight_decay"] * weight
    weight.sub_(group["lr"] * update)
