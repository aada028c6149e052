"""What is known of a step's gradients when all have been pushed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg import _C
from thalweg.ps._bucket import Bucket
from thalweg.ps._rules import Group


class Look(NamedTuple):
    """The mean of all workers' gradients as a whole."""

    squares: float  # of all elements, added up
    nonfinite: int  # elements

    @classmethod
    def at(cls, buckets: Sequence[Bucket], groups: Sequence[Group]) -> Look:
        """Waits for the squares of these buckets, whose update commits."""
        squares: dict[int, Tensor] = {}
        nonfinite = 0
        for bucket in buckets:
            found, count = bucket.squares()
            ids = (id(each.tensor) for each in bucket.parameters)
            squares.update(zip(ids, found, strict=True))
            nonfinite += count
        return cls(_total(groups, squares), nonfinite)


def _total(groups: Sequence[Group], squares: Mapping[int, Tensor]) -> float:
    """Adds up squares by parameter's id and granule, in the order of a worker's own optimizer."""
    sums = []
    for group in groups:
        found = [squares[id(tensor)] for tensor in group["params"] if id(tensor) in squares]
        if found:
            sums.append(_C.total_of_squares(torch.cat(found)))
    return functools.reduce(operator.add, sums)
