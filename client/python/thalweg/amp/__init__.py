"""Mixed precision for training: levels O0 to O3, the handle API, FP16_Optimizer.

    model, optimizer = thalweg.amp.initialize(model, optimizer, opt_level="O2")
    with thalweg.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

The names and their meaning are those of apex.amp; docs/amp.md lists them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from thalweg.amp import lists
from thalweg.amp._casts import casting as _casting
from thalweg.amp._casts import float_function, half_function, promote_function
from thalweg.amp._functions import (
    register_float_function,
    register_half_function,
    register_promote_function,
)
from thalweg.amp._initialize import initialize, load_state_dict, scale_loss, state_dict
from thalweg.amp._optimizer import master_params
from thalweg.amp._scaling import LossScaler
from thalweg.amp._state import state as _amp_state
from thalweg.amp.first_generation._handle import AmpHandle, NoOpHandle, OptimWrapper, init, rnn_cast
from thalweg.amp.fp16_utils import DynamicLossScaler, FP16_Optimizer

__all__ = [
    "AmpHandle",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "LossScaler",
    "NoOpHandle",
    "OptimWrapper",
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_cast",
    "scale_loss",
    "state_dict",
]


def disable_casts() -> AbstractContextManager[None]:
    """Returns a context in which O1 and init() cast nothing."""
    return _casting.disable()
