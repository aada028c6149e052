"""The formats in which weights come down from shards that keep them in float32."""

from __future__ import annotations

import torch

from thalweg.codecs import Int8, OneBit

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# What comes is what weights have changed by.
DIFFERENCES = (Int8.name, OneBit.name)


def chosen(asked: str | None, dtype: torch.dtype, *, differences: bool = False) -> str:
    """Returns the format in which weights of parameters of this type come. `differences` says
    whether it may be one of DIFFERENCES. Raises ValueError.
    """
    own = next((name for name, one in _TYPES.items() if one == dtype), "fp32")
    if asked is None:
        return own  # parameters of other types are refused when the workers meet
    formats = [*_TYPES, *DIFFERENCES] if differences else [*_TYPES]
    if asked not in formats:
        raise ValueError(f"thalweg: pull is {asked!r}, expected {', '.join(formats)}")
    if own not in {"fp32", asked}:
        raise ValueError(f"thalweg: pull is {asked!r}, but there are parameters in {own}")
    return asked


def type_of(pull: str) -> torch.dtype:
    """Returns the type that has all values of weights that come in this format."""
    return _TYPES.get(pull, torch.float32)
