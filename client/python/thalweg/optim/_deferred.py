"""Gradients of masters that nobody makes until somebody looks at them.

A fused step can read the gradient of a master where backward has left it: in the half-precision
parameter that the master stands for. Whoever uses `.grad` of either before that step, to clip or to
print it, is to find what would have been there anyway; so it is made when they ask. They ask in
Python: for that time the parameters have a class whose `.grad` is a property. Another backward,
which adds to what lies there, comes from C++: it is awaited by a hook.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thalweg.optim._copies import copies_of, raw_grad

if TYPE_CHECKING:
    from thalweg._C import BackwardWatch

# Of masters and their parameters: a weak reference. The optimizer alone keeps its deferral.
_ATTRIBUTE = "_thalweg_deferral"

_active: weakref.WeakSet[Deferral] = weakref.WeakSet()  # of all optimizers


class _Watched(Parameter):
    """A parameter for as long as its gradient, or that of its master, is deferred."""

    @property
    def grad(self) -> Tensor | None:
        _look_at(self)
        return raw_grad.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _look_at(self)
        raw_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _look_at(self)
        raw_grad.__delete__(self)

    # Copies and pickles are of ordinary parameters.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        _look_at(self)
        return Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        _look_at(self)
        return Parameter.__reduce_ex__(self, protocol)


class Deferral:
    """Of the gradients of one optimizer's masters, from its making to `end`."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Sequence[Parameter],
        params: Sequence[Parameter],
        *,
        scale: float,
        watch: BackwardWatch,
        make: Callable[[], None],
    ) -> None:
        """`masters` have no gradients, `params` those of masters times `scale`, and keep them.

        `watch` is of `params`. `make`, which is called at most once, gives masters their gradients.
        """
        copies = copies_of(optimizer)
        assert copies is not None
        self._copies = copies
        self._watched = [*masters, *params]
        self._grads = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in params]
        self._make = make
        device = masters[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.is_active = True
        self.was_looked_at = False
        copies.grad_exponent = math.frexp(scale)[1] - 1
        for param in self._watched:
            param.__dict__[_ATTRIBUTE] = weakref.ref(self)
            param.__class__ = _Watched
        _active.add(self)
        self._watch = watch
        reference = weakref.ref(self)  # the watch is not to keep what keeps it

        def look() -> None:
            if (deferral := reference()) is not None:
                deferral.look()

        watch.arm(look)

    def look(self) -> None:
        """Makes the gradients, unless that has been done.

        On a GPU, in the stream that was current when they were deferred. Raises RuntimeError if
        they are no longer what they were.
        """
        if not self.is_active:
            return
        self.check()
        self.end()
        self.was_looked_at = True
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._make()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def check(self) -> None:
        """Raises RuntimeError if gradients that are left to the step have changed unseen."""
        if not self.is_intact():
            raise RuntimeError(
                "gradients of the model were changed before step() by references from before, "
                "expected them unchanged: change those of master_params()"
            )

    def is_intact(self) -> bool:
        """Whether gradients are still those that there were, as far as torch has been told."""
        return all(
            raw_grad.__get__(param) is grad and (grad is None or grad._version == version)
            for param, grad, version in self._grads
        )

    def end(self) -> None:
        """Masters have their own gradients from now on, which are none so far."""
        if self.is_active:
            self.is_active = False
            self._copies.grad_exponent = None
            for param in self._watched:
                _restore(param)
            _active.discard(self)
            self._watch.disarm()
            self._watched = []
            self._grads = []


def can_defer(params: Sequence[Tensor], scale: float) -> bool:
    """Whether gradients of these, masters or their parameters, can be deferred.

    Only a power of two, from 1 on, is divided out of the gradient without a rounding: with others a
    step would have other bits than one whose gradients were looked at.
    """
    if math.frexp(scale)[0] != 0.5 or scale < 1:
        return False
    for param in params:
        if type(param) is not Parameter:
            return False
        if param.grad is not None and (param.grad.is_sparse or param.grad.is_inference()):
            return False
    return True


def _look_at(param: Tensor) -> None:
    """Has the deferred gradient made of which it is a parameter's, or its master's."""
    if (deferral := _deferral_of(param)) is not None:
        deferral.look()
    elif isinstance(param, _Watched):
        _restore(param)  # the optimizer is no more


def look_at_others(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """The optimizer is about to read gradients of its `params`: makes those that others defer."""
    if _active:
        copies = copies_of(optimizer)
        for param in params:
            deferral = _deferral_of(param)
            if deferral is not None and deferral._copies is not copies:
                deferral.look()


def _deferral_of(param: Tensor) -> Deferral | None:
    reference: weakref.ref[Deferral] | None = param.__dict__.get(_ATTRIBUTE)
    return None if reference is None else reference()


def _restore(param: Parameter) -> None:
    param.__class__ = Parameter
    param.__dict__.pop(_ATTRIBUTE, None)
