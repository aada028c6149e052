"""Puts casting wrappers in the places of torch's functions, and the functions back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch import _VF

from thalweg.amp import _lists
from thalweg.amp._casts import cast_all, match_first, promote, refuse_half

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_ABSENT = object()


class Patches:
    """Replaced attributes of modules and classes, in order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, object]] = []

    def replace(self, owner: Any, name: str, wrap: Wrap) -> None:  # noqa: ANN401
        """Puts `wrap(function)` in the place of the function; nothing if there is none."""
        function = getattr(owner, name, None)
        if function is None:
            return
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, wrap(function))

    def undo(self) -> None:
        """Puts all functions back, those found in a base class by removing what hid them."""
        for owner, name, before in reversed(self._replaced):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()


def patch_torch(patches: Patches, *, allow_banned: bool) -> None:
    """Applies O1's lists to torch."""
    tables: tuple[tuple[dict[str, str], Callable[[str], Wrap]], ...] = (
        (_lists.HALF, lambda name: lambda f: cast_all(f, True, name)),
        (_lists.FLOAT, lambda name: lambda f: cast_all(f, False, name)),
        (_lists.PROMOTE, lambda name: lambda f: promote(f, name)),
        (_lists.IN_PLACE, lambda name: lambda f: match_first(f, name)),
        (_lists.IN_PLACE_FLOAT, _refusing),
    )
    owners = _lists.namespaces()
    for table, wrap in tables:
        for owner, names in table.items():
            for name in names.split():
                patches.replace(owners[owner], name, wrap(name))
    for name in _lists.RNNS.split():
        patch_rnn(patches, _VF, name)
    for name, reason in _lists.BANNED.items():
        patches.replace(
            torch.nn.functional,
            name,
            (lambda f: cast_all(f, False))
            if allow_banned
            else (lambda f, reason=reason: refuse_half(f, reason)),  # type: ignore[misc]
        )


def patch_rnn(patches: Patches, backend: Any, name: str) -> None:  # noqa: ANN401
    """Has a recurrent function, and what it is given in lists of weights, compute in half."""
    patches.replace(backend, name, lambda f: cast_all(f, True, name))


def _refusing(name: str) -> Wrap:
    reason = (
        f"{name} was given a half-precision tensor to write into, expected float32, in which it "
        f"computes: use {name.strip('_')}, which returns a new tensor"
    )
    return lambda f: refuse_half(f, reason, first_only=True)
