"""O1: replaces torch's functions by ones that cast their arguments, and puts them back.

The lists are in `lists.py`, and users may register functions of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.nn.functional
from torch import _VF, Tensor, nn

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


class NoCasts:
    """A handle on casts that are not on; apex's handles have these names."""

    def is_active(self) -> bool:
        """Returns whether functions cast."""
        return False

    @property
    def has_cache(self) -> bool:
        """Returns whether casts of parameters are kept during an iteration."""
        return False

    @property
    def verbose(self) -> bool:
        """Returns whether each cast is printed."""
        return False

    def _disable_casts(self) -> AbstractContextManager[None]:
        """Switches casts off in a context, for arithmetic that must stay in its types."""
        return casting.disable()

    def _clear_cache(self) -> None:
        """Drops casts of parameters."""

    def _deactivate(self) -> None:
        """Puts torch's functions back."""


class Casts(NoCasts):
    """A handle on casts that are on until `_deactivate`, or until others take their place."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements

    def is_active(self) -> bool:
        """Returns whether functions cast."""
        return self._replacements.active

    @property
    def has_cache(self) -> bool:
        """Returns whether casts of parameters are kept during an iteration."""
        return casting.caching

    @property
    def verbose(self) -> bool:
        """Returns whether each cast is printed."""
        return casting.verbose

    @property
    def cache(self) -> Any:  # noqa: ANN401
        """The casts of parameters in this iteration, by parameter."""
        return casting.cache

    def remove_cache(self, param: Tensor) -> None:
        """Drops the casts of one parameter."""
        casting.cache.pop(param, None)

    def _clear_cache(self) -> None:
        """Drops casts of parameters."""
        casting.clear_cache()

    def _deactivate(self) -> None:
        """Puts torch's functions back; the handle does nothing any more."""
        if self.is_active():
            deactivate_casts()


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
    replacements.replace(nn.RNNBase, "check_input", _check_input_of_any_type)
    replacements.replace(torch.backends.mha, "get_fastpath_enabled", _without_fast_path)
    for name, reason in lists.BANNED.items():
        replacements.replace(
            torch.nn.functional,
            name,
            (lambda f: cast_all(f, False))
            if allow_banned
            else (lambda f, reason=reason: refuse_half(f, reason)),  # type: ignore[misc]
        )


def _check_input_of_any_type(check: Callable[..., None]) -> Callable[..., None]:
    """Recurrent modules compare the types of input and weights, which are cast only afterwards."""

    @functools.wraps(check)
    def wrapper(module: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        if casting.on and input.is_floating_point():
            weights = next(module.parameters()).dtype
            input = torch.empty(input.shape, dtype=weights, device="meta")
        check(module, input, batch_sizes)

    return wrapper


def _without_fast_path(is_enabled: Callable[[], bool]) -> Callable[[], bool]:
    """The fast path of attention in evaluation is one function, whose weights are not cast; torch
    leaves it out under autocast, too.
    """

    @functools.wraps(is_enabled)
    def wrapper() -> bool:
        return is_enabled() and not casting.on

    return wrapper


def _refusing(name: str) -> Wrap:
    reason = (
        f"{name} was given a half-precision tensor to write into, expected float32, in which it "
        f"computes: use {name.strip('_')}, which returns a new tensor"
    )
    return lambda f: refuse_half(f, reason, first_only=True)
