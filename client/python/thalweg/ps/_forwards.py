"""Lets forward passes wait for the weights that they need, and no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from thalweg._torch import _patches
from thalweg.ps._serving import Serving


class Handle(Protocol):
    """Ends what it stands for."""

    def remove(self) -> None: ...


# Their forward() reads the parameters of modules in them, whose own forward() it does not call.
_READ_THEIR_PARTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

_servings: weakref.WeakSet[Serving] = weakref.WeakSet()


class _Watch:
    def __init__(self, serving: Serving, hook: RemovableHandle) -> None:
        self._serving = weakref.ref(serving)
        self._hook = hook

    def remove(self) -> None:
        self._hook.remove()
        serving = self._serving()
        if serving is not None:
            _servings.discard(serving)


def watch(serving: Serving) -> Handle:
    """From now on each module waits for the parameters that its forward() reads, and for all before
    its state_dict() and load_state_dict(). Returns a handle that ends this.
    """
    ref = weakref.ref(serving)  # the hook is torch's

    def before(module: nn.Module, _: Any) -> None:  # noqa: ANN401
        ours = ref()
        if ours is not None:
            reads_parts = isinstance(module, _READ_THEIR_PARTS)
            ours.wait_for(module.parameters() if reads_parts else module._parameters.values())

    _patches.install("ps", nn.Module, "state_dict", _read_all)
    _patches.install("ps", nn.Module, "load_state_dict", _load_all)
    _servings.add(serving)
    hook = register_module_forward_pre_hook(before)
    weakref.finalize(serving, hook.remove)
    return _Watch(serving, hook)


def _read_all(
    state_dict: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    for serving in list(_servings):
        serving.wait()
    return state_dict(module, *args, **kwargs)


def _load_all(
    load_state_dict: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    for serving in list(_servings):
        if not serving.is_over:  # then nothing comes that would take the place of what is loaded
            serving.wait()
    return load_state_dict(module, *args, **kwargs)
