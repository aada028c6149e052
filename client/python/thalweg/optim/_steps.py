"""The fused steps, for Thalweg's optimizers and for torch's own."""

from __future__ import annotations

import math
from typing import Any, Protocol

from torch.optim import Optimizer

from thalweg.optim._copies import mark_stored
from thalweg.optim._plan import plan_of


class Step(Protocol):
    def __call__(self, optimizer: Any, *, own: bool) -> None:  # noqa: ANN401
        """One update of all groups.

        `own`: as in plan_of(). Raises NotFusable before anything is changed.
        """


def adam_step(optimizer: Optimizer, *, own: bool) -> None:
    """torch's Adam, and AdamW, which is Adam with decoupled_weight_decay in its groups; apex's."""
    factor = grad_factor(optimizer)
    if factor is None:
        return
    plan = plan_of(optimizer, _adam_keys, steps=True, own=own)
    for group, members in zip(optimizer.param_groups, plan.groups, strict=True):
        beta1, beta2 = group["betas"]
        members.tensors.adam(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group.get("decoupled_weight_decay", group.get("adam_w_mode", False)),
            bias_correction=group.get("bias_correction", True),
            grad_factor=-factor if group["maximize"] else factor,
        )
    mark_stored(optimizer)


def sgd_step(optimizer: Optimizer, *, own: bool) -> None:
    """torch's SGD."""
    factor = grad_factor(optimizer)
    if factor is None:
        return
    plan = plan_of(optimizer, _sgd_keys, steps=False, own=own)
    for group, members in zip(optimizer.param_groups, plan.groups, strict=True):
        members.tensors.sgd(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            fresh=members.fresh if members.keys else [],
            grad_factor=-factor if group["maximize"] else factor,
        )
        members.fresh = []
    mark_stored(optimizer)


def lamb_step(optimizer: Optimizer, *, own: bool) -> None:
    """FusedLAMB's."""
    factor = grad_factor(optimizer)
    if factor is None:
        return
    plan = plan_of(optimizer, _lamb_keys, steps=True, own=own)
    groups = optimizer.param_groups
    norm = 0.0
    if any(_bound(group) > 0 for group in groups):
        squares = math.fsum(members.tensors.grad_squares() for members in plan.groups)
        norm = math.sqrt(squares) * factor
    for group, members in zip(groups, plan.groups, strict=True):
        bound = _bound(group)
        # Not max(): a norm that is NaN must not look like one within the bound.
        clip = bound / norm if bound > 0 and not norm <= bound else 1.0
        beta1, beta2 = group["betas"]
        members.tensors.lamb(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            grad_averaging=group["grad_averaging"],
            trust_ratio=group["use_nvlamb"] or group["weight_decay"] != 0,
            grad_factor=(-factor if group["maximize"] else factor) * clip,
        )
    mark_stored(optimizer)


def grad_factor(optimizer: Optimizer) -> float | None:
    """What gradients are multiplied with; None: GradScaler has found one that is not finite."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and float(found) != 0:
        return None
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _bound(group: dict[str, Any]) -> float:
    return group["max_grad_norm"] or 0.0


def _adam_keys(group: dict[str, Any]) -> tuple[str, ...]:
    keys = ("exp_avg", "exp_avg_sq")
    return (*keys, "max_exp_avg_sq") if group.get("amsgrad") else keys


def _sgd_keys(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _lamb_keys(_: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")
