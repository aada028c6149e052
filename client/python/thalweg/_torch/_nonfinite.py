"""Counts what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor


def count(values: Tensor) -> Tensor | int:
    """Returns how many elements are NaN or infinite. Nothing waits for a GPU."""
    # A sum is fast, and is not finite where an element is not.
    if values.is_cpu and bool(values.sum(dtype=torch.float32).isfinite()):
        return 0
    return values.numel() - values.isfinite().sum()


def became(before: Tensor, after: Tensor) -> Tensor | int:
    """Returns how many elements are not finite any more, where the others stay as they are."""
    now = count(after)
    return now if isinstance(now, int) else now - count(before)
