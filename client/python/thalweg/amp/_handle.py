"""The handle of the first generation of apex's AMP: casts of functions, and scaled losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.amp._annotations import patch_registered
from thalweg.amp._casts import casting
from thalweg.amp._options import read_loss_scale
from thalweg.amp._patch import Patches, patch_rnn, patch_torch
from thalweg.amp._scale_loss import scaled, warn_of_unscaled
from thalweg.amp._scaler import LossScaler
from thalweg.amp._state import state
from thalweg.amp._steward import Steward, steward_of
from thalweg.amp._wrapper import OptimWrapper


class NoOpHandle:
    """What `init(enabled=False)` gives: the same calls, and nothing happens."""

    def is_active(self) -> bool:
        """Whether functions cast and losses are scaled."""
        return False

    def _disable_casts(self) -> AbstractContextManager[None]:
        """No casts within; for arithmetic that must stay in the types it is written for."""
        return casting.disable()

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Any]:
        """Context for backward() on its value: the loss."""
        yield loss

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer for several losses, each with a `scale_loss` of its own."""
        return OptimWrapper(optimizer, self, num_loss)

    def new_scaler(self) -> LossScaler:
        """For one loss."""
        return LossScaler(1.0)

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept during an iteration."""
        return False

    @property
    def verbose(self) -> bool:
        """Whether each cast is printed."""
        return False

    def _clear_cache(self) -> None:
        """Forgets casts of parameters."""

    def _deactivate(self) -> None:
        """Torch's functions are what they were."""


class AmpHandle(NoOpHandle):
    """What `init` gives: casts by lists are on, until `_deactivate` or the next `init`."""

    def __init__(self, loss_scale: float | str, patches: Patches) -> None:
        self._loss_scale = loss_scale
        self._patches = patches
        self._default_scaler: LossScaler | None = self.new_scaler()
        self._active = True

    def is_active(self) -> bool:
        """Whether functions cast and losses are scaled."""
        return self._active

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Any]:
        """Context for backward() on its value: the loss, float32, times the scale.

        Afterwards gradients are divided by the scale, in place, unless they are not finite: then
        the scale is halved and the next `optimizer.step()` does nothing.

        Raises:
            RuntimeError: `wrap_optimizer` has been called, whose result has the scales.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "scale_loss() of the handle was called after wrap_optimizer(), expected "
                "scale_loss() of the wrapped optimizer: it has a scale for each loss"
            )
        steward = steward_of(optimizer) or Steward(optimizer, masters=False)
        with warn_of_unscaled(loss), scaled(loss, steward, self._default_scaler) as value:
            yield value

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer for several losses; from now on `scale_loss` of the handle raises."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    def new_scaler(self) -> LossScaler:
        """For one loss."""
        return LossScaler(self._loss_scale)

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept during an iteration."""
        return casting.caching

    @property
    def verbose(self) -> bool:
        """Whether each cast is printed."""
        return casting.verbose

    @property
    def cache(self) -> Any:  # noqa: ANN401
        """Casts of parameters in this iteration, by parameter."""
        return casting.cache

    def remove_cache(self, param: Tensor) -> None:
        """Forgets the casts of one parameter."""
        casting.cache.pop(param, None)

    def _clear_cache(self) -> None:
        """Forgets casts of parameters."""
        casting.clear_cache()

    def _deactivate(self) -> None:
        """Torch's functions are what they were; the handle does nothing any more."""
        if self._active:
            self._active = casting.active = False
            self._patches.undo()
            casting.clear_cache()

    def __enter__(self) -> AmpHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deactivate()


def init(
    enabled: bool = True,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    loss_scale: float | str = "dynamic",
    *,
    half_dtype: torch.dtype = torch.float16,
) -> NoOpHandle:
    """Has torch's functions cast their arguments by lists, those of `thalweg.amp.lists`.

    Args:
        enabled: False: gives a handle that does nothing.
        enable_caching: cast a parameter once per iteration, not in every function that uses it.
        verbose: print each cast, e.g. `Float->Half (conv2d)`.
        allow_banned: compute binary_cross_entropy in float32 instead of refusing half precision.
        loss_scale: "dynamic", or a positive number; of each loss.
        half_dtype: torch.float16 or torch.bfloat16.

    Returns:
        AmpHandle, or NoOpHandle.

    Raises:
        ValueError: `loss_scale` or `half_dtype` is malformed.
    """
    if not enabled:
        activate_casts(None)
        return NoOpHandle()
    scale = read_loss_scale(loss_scale)
    if half_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"half_dtype is {half_dtype}, expected torch.float16 or torch.bfloat16")
    return activate_casts(
        half_dtype,
        enable_caching=enable_caching,
        verbose=verbose,
        allow_banned=allow_banned,
        loss_scale=scale,
    )


def activate_casts(
    half_dtype: torch.dtype | None,
    *,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    loss_scale: float | str = "dynamic",
) -> NoOpHandle:
    """Casts are on, in the place of those that were on before; `half_dtype` None: off."""
    if isinstance(state.handle, AmpHandle):
        state.handle._deactivate()
        state.handle = None
    if half_dtype is None:
        return NoOpHandle()
    patches = Patches()
    patch_torch(patches, allow_banned=allow_banned)
    patch_registered(patches)
    casting.half_dtype = half_dtype
    casting.caching = enable_caching
    casting.verbose = verbose
    casting.host = not torch.accelerator.is_available()
    casting.suspended = casting.stepping = False
    casting.active = True
    handle = state.handle = AmpHandle(loss_scale, patches)
    return handle


def rnn_cast(backend: Any, name: str, handle: NoOpHandle, verbose: bool = False) -> None:  # noqa: ANN401
    """Has the recurrent function `backend.name` compute in half while `handle` is active.

    init() does so with all of torch's; this is for others. Weights in lists are cast, and cached,
    like arguments. With `verbose`, all casts of the handle are printed.
    """
    if isinstance(handle, AmpHandle) and handle.is_active():
        casting.verbose = casting.verbose or verbose
        patch_rnn(handle._patches, backend, name)
