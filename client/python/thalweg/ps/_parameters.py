"""The parameters that shards update, and how they are cut into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.codecs import FP32, Lossy
from thalweg.policy import Policy
from thalweg.ps._pushed_grad import PushedGrad
from thalweg.ps._rules import Group

_FLOATS = Policy(FP32())
_FIRST_BYTES = 1 << 20  # as in DistributedDataParallel: the first can leave early


class Parameter(NamedTuple):
    """A parameter that shards update."""

    name: str
    tensor: Tensor
    group: int  # number of its group
    settings: int  # number of its settings on the shards

    @property
    def has_gradient(self) -> bool:
        """Whether it has one that has not been gathered."""
        grad = self.tensor.grad
        return grad is not None and not isinstance(grad, PushedGrad)


def served(groups: Sequence[Group], *, apart: bool = False) -> list[Parameter]:
    """Returns the parameters that require a gradient, with their names or "group.index". `apart`:
    each has settings of its own, in the place of its group's.
    """
    found: list[Parameter] = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [
            f"{number}.{index}" for index in range(len(group["params"]))
        ]
        for name, tensor in zip(names, group["params"], strict=True):
            if tensor.requires_grad:
                found.append(Parameter(name, tensor, number, len(found) if apart else number))
    return found


def cut(
    parameters: Sequence[Parameter], bytes_: int, codecs: Policy = _FLOATS
) -> list[list[Parameter]]:
    """Returns the buckets of parameters in the order in which a backward pass should fill them.

    A bucket has one type, and at least one parameter; others only as far as `bytes_` allow, and
    only of those whose gradients go up in floats.
    """
    buckets: list[list[Parameter]] = []
    sizes: list[int] = []
    open_: dict[torch.dtype, int] = {}  # the number of the bucket of each type that is not full
    for parameter in reversed(parameters):
        dtype, size = parameter.tensor.dtype, parameter.tensor.nbytes
        if isinstance(codecs.codec_of(parameter.name, parameter.tensor.shape), Lossy):
            buckets.append([parameter])
            sizes.append(size)
            continue
        number = open_.get(dtype)
        limit = min(_FIRST_BYTES, bytes_) if number == 0 else bytes_
        if number is None or sizes[number] + size > limit:
            number = open_[dtype] = len(buckets)
            buckets.append([])
            sizes.append(0)
        buckets[number].append(parameter)
        sizes[number] += size
    return buckets
