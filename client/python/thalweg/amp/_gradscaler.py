"""Makes torch's GradScaler serve optimizers that `aiak_amp_decorate` has given masters.

GradScaler looks for gradients in `param_groups`, which hold masters; theirs come from the model at
the moment it looks. Its scale follows the decoration's settings instead of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from thalweg._precision import observing
from thalweg.amp._scaler import SMALLEST_SCALE
from thalweg.amp._state import state
from thalweg.amp._steward import steward_of
from thalweg.optim import _finite

_SCALING = "_amp_scaling"  # attribute of a GradScaler that follows a decoration
_LOADED = "_amp_loaded"  # attribute of one whose scale comes from a checkpoint


class Scaling(NamedTuple):
    """How a decoration wants losses scaled; see `LossScaler`."""

    loss_scale: float | str
    min_loss_scale: float | None
    max_loss_scale: float

    def apply(self, scaler: GradScaler) -> None:
        """Puts the settings in the place of the scaler's own."""
        dynamic = self.loss_scale == "dynamic"
        factor = 2.0 if dynamic else 1.0
        scaler._growth_factor = factor
        scaler._backoff_factor = 1.0 / factor
        scaler._growth_interval = 2000

    def initial(self) -> float:
        """The scale of the first loss."""
        if self.loss_scale == "dynamic":
            return min(2.0**16, self.max_loss_scale)
        return float(self.loss_scale)

    def clamp(self, scale: torch.Tensor) -> None:
        """Keeps a dynamic scale, a tensor of one float32, within its bounds; waits for nothing."""
        if self.loss_scale == "dynamic":
            floor = SMALLEST_SCALE if self.min_loss_scale is None else self.min_loss_scale
            scale.clamp_(floor, self.max_loss_scale)


_decorated: list[tuple[weakref.ref[Optimizer], Scaling]] = []


def decorate(optimizer: Optimizer, scaling: Scaling) -> None:
    """GradScalers that scale losses from now on follow `scaling`."""
    install()
    _decorated.append((weakref.ref(optimizer), scaling))


@functools.cache
def install() -> None:
    """Wraps four methods of GradScaler; without a decorated optimizer they do what they did."""
    _finite.install()  # below: it is to look at gradients that have been shown
    unscale = GradScaler._unscale_grads_
    scale: Callable[..., Any] = GradScaler.scale
    update: Callable[..., None] = GradScaler.update
    load: Callable[..., None] = GradScaler.load_state_dict

    @functools.wraps(unscale)
    def materialise_and_unscale(
        self: GradScaler,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Any:  # noqa: ANN401
        _show_gradients(optimizer, before_step=allow_fp16)
        return unscale(self, optimizer, inv_scale, found_inf, allow_fp16)

    @functools.wraps(scale)
    def adopt_and_scale(self: GradScaler, outputs: Any) -> Any:  # noqa: ANN401
        if self.is_enabled() and _SCALING not in self.__dict__:
            _adopt(self)
        return scale(self, outputs)

    @functools.wraps(update)
    def update_and_clamp(self: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        scaling: Scaling | None = self.__dict__.get(_SCALING)
        with observing(self):  # the clamp included
            if scaling is not None:
                scaling.apply(self)
            update(self, *args, **kwargs)
            if scaling is not None and self._scale is not None:
                scaling.clamp(self._scale)

    @functools.wraps(load)
    def load_and_remember(self: GradScaler, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        self.__dict__[_LOADED] = True

    GradScaler._unscale_grads_ = materialise_and_unscale  # type: ignore[method-assign]
    GradScaler.scale = adopt_and_scale  # type: ignore[method-assign]
    GradScaler.update = update_and_clamp  # type: ignore[method-assign]
    GradScaler.load_state_dict = load_and_remember  # type: ignore[method-assign]


def _adopt(scaler: GradScaler) -> None:
    """Has the scaler follow the latest decoration whose optimizer is still there, if any."""
    _decorated[:] = [entry for entry in _decorated if entry[0]() is not None]
    if not _decorated:
        return
    scaling = _decorated[-1][1]
    scaler.__dict__[_SCALING] = scaling
    scaling.apply(scaler)
    if not scaler.__dict__.get(_LOADED, False) and scaler._scale is None:
        scaler._init_scale = scaling.initial()


def _show_gradients(optimizer: Optimizer, *, before_step: bool) -> None:
    steward = steward_of(optimizer)
    if steward is None:
        return
    if not steward.native and not state.trivial:
        raise RuntimeError(
            "GradScaler was given an optimizer of thalweg.amp, whose gradients scale_loss() has "
            "divided already: use one or the other"
        )
    steward.materialise(before_step=before_step)
