"""Half-precision copies of an optimizer's parameters, which are then masters.

A fused step stores their roundings in the same pass, and can read the gradients that they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ATTRIBUTE = "_thalweg_copies"

# `.grad` of any tensor, of those too whose class has a property before it.
raw_grad: Any = torch._C.TensorBase.grad


class Copies:
    """What one optimizer is to store beside its parameters, which are masters.

    A fused step stores the copies of parameters that have a gradient; others know nothing of it.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`pairs`: a parameter and its copy, of the same shape and in any type that is fused."""
        self.of = {id(param): copy for param, copy in pairs}
        self.stored = False
        # Not None: masters have no gradients; those of their copies, 2**grad_exponent times theirs,
        # are in their place.
        self.grad_exponent: int | None = None


def ask_for_copies(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """From now on; takes the place of what was asked for before."""
    optimizer.__dict__[_ATTRIBUTE] = Copies(pairs)


def forget_copies(optimizer: Optimizer) -> None:
    """From now on nothing is stored beside parameters."""
    optimizer.__dict__.pop(_ATTRIBUTE, None)


def take_stored(optimizer: Optimizer) -> bool:
    """Whether the latest step has stored copies; asks once."""
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
    """What has been asked for."""
    copies: Copies | None = optimizer.__dict__.get(_ATTRIBUTE)
    return copies


def read_grad(param: Tensor, copies: Copies | None) -> Tensor | None:
    """What a step that stores `copies` reads as the gradient of `param`; not a look at it."""
    if copies is not None and copies.grad_exponent is not None:
        param = copies.of.get(id(param), param)
    grad: Tensor | None = raw_grad.__get__(param)
    return grad


def has_grad(param: Tensor, copies: Copies | None) -> bool:
    """Whether a step that stores `copies` has a gradient for `param`."""
    return read_grad(param, copies) is not None
