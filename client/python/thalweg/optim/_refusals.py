"""Remembers which optimizers the kernels cannot update, and takes the other way at once.

Finding that out takes longer than the step itself where there are many parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer

from thalweg.optim._state import forget_steps

_KINDS = tuple(map(attrgetter, ("dtype", "layout", "device")))


class _Refusal:
    """A reason, for as long as parameters are the same and their gradients of the same kinds."""

    def __init__(self, optimizer: Optimizer, reason: str) -> None:
        self.reason = reason
        self._seen = _seen(optimizer)

    def holds(self, optimizer: Optimizer) -> bool:
        return _seen(optimizer) == self._seen


_refusals: weakref.WeakKeyDictionary[Optimizer, _Refusal] = weakref.WeakKeyDictionary()


@contextmanager
def remembered_refusals(optimizer: Optimizer) -> Iterator[None]:
    """Raises NotFusable before a step that would, and remembers that a step has raised it.

    For optimizers with another way to step, which is right whatever the reason was.
    """
    from thalweg._C import NotFusable

    known = _refusals.get(optimizer)
    if known is not None and known.holds(optimizer):
        raise NotFusable(known.reason)
    try:
        yield
    except NotFusable as error:
        _refusals[optimizer] = _Refusal(optimizer, str(error))
        forget_steps(optimizer)
        raise


def _seen(optimizer: Optimizer) -> list[Any]:
    """Returns all that decides, in one flat list: a thousand tuples would start the collector."""
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    grads = [param.grad for param in params]
    tensors = [tensor for tensor in (*params, *grads) if tensor is not None]
    seen: list[Any] = list(map(id, params))  # references would keep the optimizer alive in cycles
    seen.extend(grad is None for grad in grads)
    seen.extend(map(type, tensors))
    for kind in _KINDS:
        seen.extend(map(kind, tensors))
    return seen
