"""Float32 masters of half-precision parameters.

A parameter has one master, whatever number of optimizers updates it. The master is the weight: the
parameter is its rounding, checkpoints contain the master, and whoever writes into the parameter
(a broadcast, a checkpoint, an average of weights) has the master follow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

_masters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter


class Master:
    """`weight`, float32 and of the parameter's shape; what optimizers update and checkpoints hold.

    The parameter is passed to each method: a reference to it from here would keep it alive.
    """

    __slots__ = ("_version", "weight")

    def __init__(self, param: Parameter, weight: Tensor) -> None:
        self.weight = Parameter(
            torch.empty_like(param, dtype=torch.float32).copy_(weight),
            requires_grad=param.requires_grad,
        )
        self._version = param._version

    def mark_equal(self, param: Tensor) -> None:
        """The parameter has just been rounded from the weight."""
        self._version = param._version

    def follow(self, param: Tensor) -> None:
        """Has the weight follow a parameter that somebody else has written into since.

        An element that is still its weight's rounding keeps the weight's precision; any other is
        taken from the parameter. Writes through `param.data` go unseen: torch does not count them.
        """
        if self._version == param._version:
            return
        with torch.no_grad():
            kept = self.weight.to(param.dtype) == param
            self.weight.copy_(torch.where(kept, self.weight, param.float()))
        self._version = param._version


def master_of(param: Tensor) -> Master | None:
    """The master of a parameter of a model, if it has one."""
    master: Master | None = _masters.get(param)
    return master


def ensure_master(param: Parameter, weight: Tensor | None = None) -> Master:
    """The master of a half-precision parameter; made from `weight` (default: what it holds now).

    Args:
        param: of any shape, in a half type.
        weight: float32, of the same shape: what the parameter was before it was rounded.
    """
    master = master_of(param)
    if master is None:
        master = _masters[param] = Master(param, param.detach() if weight is None else weight)
    return master


def forget_master(param: Tensor) -> None:
    """The parameter stands for itself again."""
    _masters.pop(param, None)
