"""Half-precision copies of an optimizer's parameters, which are then masters.

A fused step stores the roundings in the pass that updates the masters.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

_ATTRIBUTE = "_thalweg_copies"


class Copies:
    """Copies are what one optimizer stores beside its parameters, which are masters.

    A fused step stores the copies of parameters that have a gradient; others know nothing of it.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`pairs`: a parameter and its copy, of the same shape and in any type that is fused."""
        self.of = {id(param): copy for param, copy in pairs}
        self.stored = False


def ask_for_copies(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """From now on; takes the place of what was asked for before."""
    optimizer.__dict__[_ATTRIBUTE] = Copies(pairs)


def forget_copies(optimizer: Optimizer) -> None:
    """From now on nothing is stored beside parameters."""
    optimizer.__dict__.pop(_ATTRIBUTE, None)


def take_stored(optimizer: Optimizer) -> bool:
    """Returns whether the latest step has stored copies, and forgets it."""
    copies = copies_of(optimizer)
    stored = copies is not None and copies.stored
    if copies is not None:
        copies.stored = False
    return stored


def mark_stored(optimizer: Optimizer) -> None:
    """The step has stored the copies of parameters that have a gradient."""
    copies = copies_of(optimizer)
    if copies is not None:
        copies.stored = True


def copies_of(optimizer: Optimizer) -> Copies | None:
    """Returns the copies that were asked for; None: none were."""
    copies: Copies | None = optimizer.__dict__.get(_ATTRIBUTE)
    return copies
