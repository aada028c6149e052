"""Calls a function once, before the first gradients of a module are averaged.

All workers come there, and nowhere else before: gradients are averaged in eval mode as well, a
worker that evaluates with gradients runs forward alone, and one that is out of data inside join()
runs neither forward nor backward. So the call comes with the first gradient after a forward pass
for whose backward pass torch averages, or in what a worker does in join() in place of that pass.

Until then the module has hooks. In copies of it, and where it is saved, something of Python or
torch has their places, so that a module loads where Thalweg is not installed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_IN_JOIN = "_match_all_reduce_for_bwd_pass"  # of DistributedDataParallel

_calls: weakref.WeakKeyDictionary[DistributedDataParallel, Callable[..., None]] = (
    weakref.WeakKeyDictionary()
)
# The hook before forward passes.
_forwards: weakref.WeakKeyDictionary[DistributedDataParallel, RemovableHandle] = (
    weakref.WeakKeyDictionary()
)
# The hooks of parameters, of which it has the addresses.
_watches: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[set[int], RemovableHandle]] = (
    weakref.WeakKeyDictionary()
)


class ForwardHook:
    """Calls `function` with a module before each of its forward passes, but not in its copies."""

    def __init__(self, function: Callable[[DistributedDataParallel], None]) -> None:
        self._function = function

    @_disable_dynamo
    def __call__(self, module: DistributedDataParallel, inputs: object) -> None:
        self._function(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # Called with a module and its inputs, this returns the inputs.
        return getattr, ({}, "get")


class _InJoin:
    """Is called in place of the module's method of this name."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> None:
        module = self._module()
        assert module is not None
        _begin(module)
        module._match_all_reduce_for_bwd_pass()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (getattr(DistributedDataParallel, _IN_JOIN), self._module())


def call(
    module: DistributedDataParallel, function: Callable[[DistributedDataParallel], None]
) -> None:
    """Calls `function` with the module, which it must not own. What it raises, backward() does."""
    _calls[module] = function
    _forwards[module] = module.register_forward_pre_hook(ForwardHook(_watch))
    vars(module)[_IN_JOIN] = _InJoin(module)


def cancel(module: DistributedDataParallel) -> None:
    """Does not call it any more."""
    if _calls.pop(module, None) is None:
        return
    _forwards.pop(module).remove()
    _unwatch(module)
    del vars(module)[_IN_JOIN]


def _begin(module: DistributedDataParallel) -> None:
    if (function := _calls.get(module)) is not None:
        cancel(module)
        function(module)


def _watch(module: DistributedDataParallel) -> None:
    """Notices the first gradient, if torch is going to average after this forward pass."""
    if not torch.is_grad_enabled() or not module.require_backward_grad_sync:
        return
    from thalweg._attach import _model  # it is native, which a switch must not load

    parameters = [
        parameter for _, parameter in _model.parameters(module) if parameter.requires_grad
    ]
    addresses = set(map(id, parameters))
    if not parameters or (module in _watches and _watches[module][0] == addresses):
        return
    _unwatch(module)
    weak = weakref.ref(module)

    def begin(_: object) -> None:
        if (module := weak()) is not None:
            _begin(module)

    handle = register_multi_grad_hook(parameters, begin, mode="any")
    _watches[module] = addresses, handle
    weakref.finalize(module, handle.remove).atexit = False  # parameters may live longer


def _unwatch(module: DistributedDataParallel) -> None:
    if module in _watches:
        _watches.pop(module)[1].remove()
