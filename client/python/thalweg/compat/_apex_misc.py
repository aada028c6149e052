"""Implements small functions that scripts import from apex's modules."""

from __future__ import annotations

import warnings

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from thalweg.amp import _amp_state

__all__ = [
    "DeprecatedFeatureWarning",
    "deprecated_warning",
    "flatten",
    "maybe_print",
    "unflatten",
    "warn_or_err",
]


class DeprecatedFeatureWarning(FutureWarning):
    """Is there for scripts that filter it. Nothing of Thalweg is deprecated, so nothing warns."""


def deprecated_warning(msg: str) -> None:
    """Warns with apex's class."""
    warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Logs a line unless the verbosity is 0; `rank0`: on rank 0 only."""
    _amp_state.say(msg, once=rank0)


def warn_or_err(msg: str) -> None:
    """Raises RuntimeError, or logs a line if `_amp_state.hard_override` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    _amp_state.say(msg)
