"""Lets DistributedDataParallel modules leave their gradients to others, whatever their scripts do.

torch's own switch for that is `module.require_backward_grad_sync`. Scripts set it, too: no_sync()
does, and so do those that accumulate gradients without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast

from torch.nn.parallel import DistributedDataParallel

_NAME = "require_backward_grad_sync"
_OURS = "_thalweg_switch"

_kinds: dict[type[DistributedDataParallel], type[DistributedDataParallel]] = {}
_listeners: weakref.WeakKeyDictionary[DistributedDataParallel, Callable[[bool], None]] = (
    weakref.WeakKeyDictionary()
)


class _Off:
    """Is false for torch, and knows what the script has set: who reads the switch to put it back
    later, as no_sync() does, puts that back.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "False"


_OFF = {wanted: _Off(wanted) for wanted in (False, True)}


def leave(module: DistributedDataParallel, listener: Callable[[bool], None] | None = None) -> None:
    """From now on the module leaves its gradients as backward passes make them. `listener` is told
    whenever the script says whether the next ones are the last of a step.

    The module's class is derived from its former one. Its copies are not: they average gradients.
    """
    before = type(module)
    if before not in _kinds:
        _kinds[before] = _derive(before)
    if listener is not None:
        _listeners[module] = listener
    vars(module)[_OURS] = _OFF[bool(vars(module)[_NAME])]
    module.__class__ = _kinds[before]


def _derive(before: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    members = {
        _NAME: property(_read, _set),
        "__reduce_ex__": _reduce,
        "__doc__": before.__doc__,
        "__module__": before.__module__,
        "__qualname__": before.__qualname__,
    }
    return cast(type[DistributedDataParallel], type(before.__name__, (before,), members))


def _read(module: DistributedDataParallel) -> object:
    return module._thalweg_switch  # torch.compile traces this


def _set(module: DistributedDataParallel, value: object) -> None:
    wanted = value.wanted if isinstance(value, _Off) else bool(value)
    module._thalweg_switch = _OFF[wanted]  # type: ignore[assignment]
    if (listener := _listeners.get(module)) is not None:
        listener(wanted)


def _reduce(module: DistributedDataParallel, _: object) -> tuple[object, ...]:
    """Stores and copies a module as one of its former class, which others can load."""
    state = module.__getstate__()
    state[_NAME] = state.pop(_OURS).wanted
    return object.__new__, (type(module).__base__,), state
