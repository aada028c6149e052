"""Implements the fused steps, for Thalweg's optimizers and for torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from thalweg.optim import _finite
from thalweg.optim._copies import mark_stored
from thalweg.optim._norm import Norm, drop_norm, drop_squares, grad_bounds, take_squares
from thalweg.optim._plan import Keys, Plan, on_device, plan_of
from thalweg.optim._shards import refuse_norms_of_flat_shards

_Group = dict[str, Any]


class Step(Protocol):
    def __call__(self, optimizer: Any, *, own: bool) -> None:  # noqa: ANN401
        """Updates all groups once.

        See plan_of() for `own`. Raises NotFusable before anything is changed.
        """


def adam_step(optimizer: Optimizer, *, own: bool) -> None:
    """Does a step of torch's Adam or AdamW (a group's decoupled_weight_decay), or of apex's."""
    from thalweg._C import AdamSettings

    def settings(group: _Group, common: _Group) -> AdamSettings:
        return AdamSettings(
            **common,
            betas=_betas(group),
            eps=group["eps"],
            decoupled=bool(group.get("decoupled_weight_decay", group.get("adam_w_mode"))),
            bias_correction=group.get("bias_correction", True),
        )

    _step(optimizer, "adam", settings, _adam_keys, own=own)


def sgd_step(optimizer: Optimizer, *, own: bool) -> None:
    """Does a step of torch's SGD."""
    from thalweg._C import SgdSettings

    def settings(group: _Group, common: _Group) -> SgdSettings:
        return SgdSettings(
            **common,
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
        )

    _step(optimizer, "sgd", settings, _sgd_keys, own=own, steps=False)


def lamb_step(optimizer: Optimizer, *, own: bool) -> None:
    """Does a step of FusedLAMB."""
    from thalweg._C import LambSettings

    def settings(group: _Group, common: _Group) -> LambSettings:
        return LambSettings(
            **common,
            betas=_betas(group),
            eps=group["eps"],
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            grad_averaging=group["grad_averaging"],
            trust_ratio=group["use_nvlamb"] or group["weight_decay"] != 0,
        )

    _step(optimizer, "lamb", settings, _lamb_keys, own=own, shards=False)


def _step(
    optimizer: Optimizer,
    kernel: str,
    settings: Callable[[_Group, _Group], Any],
    keys: Keys,
    *,
    own: bool,
    steps: bool = True,
    shards: bool = True,
) -> None:
    """Updates all groups by the kernel of that name. `settings` makes its settings of a group, and
    of those that all kernels have; plan_of() says what the others are.
    """
    inputs = inputs_of(optimizer)
    if inputs is None:
        return
    with plan_of(optimizer, keys, steps=steps, own=own, shards=shards) as plan:
        if plan.has_flat_shards and (kernel == "lamb" or any(grad_bounds(optimizer))):
            refuse_norms_of_flat_shards(optimizer)
        bounds = _clip(optimizer, plan, inputs)
        groups = zip(optimizer.param_groups, plan.groups, bounds, strict=True)
        for group, members, bound in groups:
            lr, device_lr = _lr(optimizer, group)
            common = {
                "lr": lr,
                "weight_decay": float(group["weight_decay"]),
                "maximize": group["maximize"],
                "max_grad_norm": bound,
            }
            update = getattr(members.tensors, kernel)
            update(settings(group, common), **inputs, **device_lr)
    mark_stored(optimizer)


def grad_scale(optimizer: Optimizer) -> float | None:
    """Returns what gradients are divided by; None: GradScaler has found one that is not finite."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and float(found) != 0:
        return None
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def inputs_of(optimizer: Optimizer) -> dict[str, Any] | None:
    """Returns what GradScaler passes, as inputs of the plan's tensors; None: there is no step."""
    _finite.install()
    if on_device(optimizer):  # the device reads it when the step runs, so that nothing waits
        # GradScaler's sum, which is 0 without gradients
        found = getattr(optimizer, "found_inf", None)
        return {
            "grad_scale": getattr(optimizer, "grad_scale", None),
            "found_inf": found if isinstance(found, Tensor) else None,
        }
    scale = grad_scale(optimizer)
    if scale is None:
        squares = drop_squares(optimizer)
        drop_norm(optimizer)
        if squares is not None:
            optimizer.__dict__["_norm"] = Norm(squares, None)
        return None
    return {"grad_scale": scale}


def _clip(optimizer: Optimizer, plan: Plan, inputs: dict[str, Any]) -> list[float]:
    """Returns each group's bound of the norm, or 0, and adds what clipping needs to `inputs`.

    Raises NotFusable.
    """
    bounds = grad_bounds(optimizer)
    if not any(bounds):
        drop_norm(optimizer)
        return bounds
    squares = take_squares(optimizer, plan)
    inputs["grad_squares"] = squares
    optimizer.__dict__["_norm"] = Norm(squares, inputs["grad_scale"])
    return bounds


def _lr(optimizer: Optimizer, group: _Group) -> tuple[float, dict[str, Tensor]]:
    """Returns the rate, or none and the tensor from which the device reads it."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and on_device(optimizer):
        return 0.0, {"lr": lr}
    return float(lr), {}


def _betas(group: _Group) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _adam_keys(group: _Group) -> tuple[str, ...]:
    keys = ("exp_avg", "exp_avg_sq")
    return (*keys, "max_exp_avg_sq") if group.get("amsgrad") else keys


def _sgd_keys(group: _Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _lamb_keys(_: _Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")
