"""Functions of the user that take part in casting: annotated, or registered before init()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thalweg.amp._casts import cast_all, promote
from thalweg.amp._patch import Patches, Wrap

Function = Callable[..., Any]
_registered: list[tuple[Any, str, Wrap]] = []


def half_function(function: Function) -> Function:
    """Decorator: floating point tensors are cast to the half type, while casts are on."""
    return cast_all(function, True)


def float_function(function: Function) -> Function:
    """Decorator: half-precision tensors are cast to float32, while casts are on."""
    return cast_all(function, False)


def promote_function(function: Function) -> Function:
    """Decorator: tensors are cast to the widest type among them, while casts are on."""
    return promote(function)


def register_half_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Has the next init() treat `module.name` as `half_function` does.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: cast_all(f, True, name))


def register_float_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Has the next init() treat `module.name` as `float_function` does.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: cast_all(f, False, name))


def register_promote_function(module: Any, name: str) -> None:  # noqa: ANN401
    """Has the next init() treat `module.name` as `promote_function` does.

    Raises ValueError if there is no such function.
    """
    _register(module, name, lambda f: promote(f, name))


def patch_registered(patches: Patches) -> None:
    """Applies what has been registered; a registration serves every init() after it."""
    for module, name, wrap in _registered:
        patches.replace(module, name, wrap)


def _register(module: Any, name: str, wrap: Wrap) -> None:  # noqa: ANN401
    if not hasattr(module, name):
        raise ValueError(
            f"{getattr(module, '__name__', module)} has no function {name!r}: nothing to register"
        )
    _registered.append((module, name, wrap))
