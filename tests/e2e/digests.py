"""Digests what trainings end with, also for scripts that import nothing of Thalweg."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(value: Any) -> str:
    """Returns a digest of a module's parameters, or of all values of nested dictionaries and lists
    and their names, bit for bit; of a DTensor it takes this rank's part.

    Asserts that all tensors are finite, since nothing is shown by NaNs that are equal.
    """
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            add(list(value.parameters()))
        elif isinstance(value, dict):
            for name in sorted(value, key=str):
                sha.update(str(name).encode())
                add(value[name])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif isinstance(value, torch.Tensor):
            part = (value.to_local() if hasattr(value, "to_local") else value).detach()
            assert part.isfinite().all()
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(part.flatten().view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()
