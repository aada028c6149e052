"""Makes torch's GradScaler serve optimizers that `aiak_amp_decorate` has given masters.

GradScaler looks for gradients in `param_groups`, which hold masters. They get theirs from the model
at the moment it looks. Its scale follows the decoration's rule instead of its own settings.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from thalweg._torch import _patches
from thalweg.amp._optimizer import mixed_optimizer_of
from thalweg.amp._scaling import ScaleRule
from thalweg.optim import _finite

_RULE = "_amp_rule"  # attribute of a GradScaler that follows a decoration
_LOADED = "_amp_loaded"  # attribute of a GradScaler whose scale comes from a checkpoint

_decorated: list[tuple[weakref.ref[Optimizer], ScaleRule]] = []


def decorate(optimizer: Optimizer, rule: ScaleRule) -> None:
    """Makes GradScalers follow `rule` that first scale a loss while the optimizer lives."""
    install()
    _decorated.append((weakref.ref(optimizer), rule))


def install() -> None:
    """Replaces methods of GradScaler; without a decorated optimizer they do what torch's do."""
    _finite.install()  # it looks at the gradients that masters have been given
    for name, around in (
        ("_unscale_grads_", _fill_and_unscale),
        ("scale", _follow_and_scale),
        ("update", _update_and_clamp),
        ("load_state_dict", _load_and_remember),
    ):
        _patches.install("amp", GradScaler, name, around)


def _fill_and_unscale(
    unscale: Callable[..., dict[torch.device, Tensor]],
    scaler: GradScaler,
    /,
    optimizer: Optimizer,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> dict[torch.device, Tensor]:
    mixed = mixed_optimizer_of(optimizer)
    if mixed is not None:
        if not mixed.native and mixed.scales:
            raise RuntimeError(
                "GradScaler was given an optimizer of thalweg.amp, whose gradients scale_loss() "
                "has divided already: use one or the other"
            )
        mixed.fill_masters()
    return unscale(scaler, optimizer, *args, **kwargs)


def _follow_and_scale(
    scale: Callable[..., Any],
    scaler: GradScaler,
    /,
    outputs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if scaler.is_enabled() and _RULE not in scaler.__dict__:
        _follow_latest(scaler)
    return scale(scaler, outputs)


def _update_and_clamp(
    update: Callable[..., None],
    scaler: GradScaler,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    rule: ScaleRule | None = scaler.__dict__.get(_RULE)
    if rule is not None:
        _apply(rule, scaler)
    update(scaler, *args, **kwargs)
    if rule is not None and rule.dynamic and scaler._scale is not None:
        scaler._scale.clamp_(rule.floor, rule.max_loss_scale)  # waits for nothing


def _load_and_remember(
    load: Callable[..., None], scaler: GradScaler, /, state_dict: dict[str, Any]
) -> None:
    load(scaler, state_dict)
    scaler.__dict__[_LOADED] = True


def _apply(rule: ScaleRule, scaler: GradScaler) -> None:
    """Puts the rule in the place of the scaler's own settings."""
    factor = rule.scale_factor if rule.dynamic else 1.0
    scaler._growth_factor = factor
    scaler._backoff_factor = 1.0 / factor
    scaler._growth_interval = rule.scale_window


def _follow_latest(scaler: GradScaler) -> None:
    """Makes the scaler follow the latest decoration whose optimizer is still there, if any."""
    _decorated[:] = [entry for entry in _decorated if entry[0]() is not None]
    if not _decorated:
        return
    rule = _decorated[-1][1]
    scaler.__dict__[_RULE] = rule
    _apply(rule, scaler)
    if not scaler.__dict__.get(_LOADED, False) and scaler._scale is None:
        scaler._init_scale = rule.initial()
