"""O1: replaces torch's functions by ones that cast their arguments, and puts them back.

The lists are in `lists.py`, and users may register functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional
from torch import _VF

from thalweg.amp import lists
from thalweg.amp._casts import cast_all, casting, match_first, promote, refuse_half

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_ABSENT = object()


class Replacements:
    """Attributes of modules and classes that have been replaced, in order."""

    current: ClassVar[Replacements | None] = None  # those of activate_casts()

    def __init__(self) -> None:
        self.active = True  # until undo()
        self._replaced: list[tuple[Any, str, object]] = []

    def replace(self, owner: Any, name: str, wrap: Wrap) -> None:  # noqa: ANN401
        """Puts `wrap(function)` in the place of the function; does nothing if there is none."""
        function = getattr(owner, name, None)
        if function is None:
            return
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, wrap(function))

    def undo(self) -> None:
        """Puts all functions back; for those of a base class, removes what hid them."""
        for owner, name, before in reversed(self._replaced):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
        self.active = False


_registered: list[tuple[Any, str, Wrap]] = []


def activate_casts(
    half_dtype: torch.dtype,
    *,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Replacements:
    """Switches casts on, in the place of those that were on before."""
    deactivate_casts()
    Replacements.current = replacements = Replacements()
    _replace_listed(replacements, allow_banned=allow_banned)
    for module, name, wrap in _registered:
        replacements.replace(module, name, wrap)
    casting.half_dtype = half_dtype
    casting.caching = enable_caching
    casting.verbose = verbose
    casting.host = not torch.accelerator.is_available()
    casting.suspended = casting.stepping = False
    casting.active = True
    return replacements


def deactivate_casts() -> None:
    """Puts torch's functions back; does nothing if no casts are on."""
    if Replacements.current is not None:
        casting.active = False
        Replacements.current.undo()
        Replacements.current = None
        casting.clear_cache()


def register_half_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Makes `module.name` behave as under `half_function`, from the next init() on.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: cast_all(f, True, name))


def register_float_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Makes `module.name` behave as under `float_function`, from the next init() on.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: cast_all(f, False, name))


def register_promote_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Makes `module.name` behave as under `promote_function`, from the next init() on.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: promote(f, name))


def replace_rnn(replacements: Replacements, backend: Any, name: str) -> None:  # noqa: ANN401
    """Makes a recurrent function compute in half, weights in lists included."""
    replacements.replace(backend, name, lambda f: cast_all(f, True, name))


def _register(module: Any, name: str, wrap: Wrap) -> None:  # noqa: ANN401
    if not hasattr(module, name):
        raise ValueError(
            f"{getattr(module, '__name__', module)} has no function {name!r}: nothing to register"
        )
    _registered.append((module, name, wrap))


def _replace_listed(replacements: Replacements, *, allow_banned: bool) -> None:
    """Replaces what the lists name."""
    tables: tuple[tuple[dict[str, str], Callable[[str], Wrap]], ...] = (
        (lists.HALF, lambda name: lambda f: cast_all(f, True, name)),
        (lists.FLOAT, lambda name: lambda f: cast_all(f, False, name)),
        (lists.PROMOTE, lambda name: lambda f: promote(f, name)),
        (lists.IN_PLACE, lambda name: lambda f: match_first(f, name)),
        (lists.IN_PLACE_FLOAT, _refusing),
    )
    owners = lists.namespaces()
    for table, wrap in tables:
        for owner, names in table.items():
            for name in names.split():
                replacements.replace(owners[owner], name, wrap(name))
    for name in lists.RNNS.split():
        replace_rnn(replacements, _VF, name)
    for name, reason in lists.BANNED.items():
        replacements.replace(
            torch.nn.functional,
            name,
            (lambda f: cast_all(f, False))
            if allow_banned
            else (lambda f, reason=reason: refuse_half(f, reason)),  # type: ignore[misc]
        )


def _refusing(name: str) -> Wrap:
    reason = (
        f"{name} was given a half-precision tensor to write into, expected float32, in which it "
        f"computes: use {name.strip('_')}, which returns a new tensor"
    )
    return lambda f: refuse_half(f, reason, first_only=True)
