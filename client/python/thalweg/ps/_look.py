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
from thalweg.ps._unused import Used


class Look(NamedTuple):
    """The mean of all workers' gradients as a whole."""

    squares: float  # of all elements, added up
    nonfinite: int  # elements
    buckets: Sequence[Bucket]  # those of which anything has a gradient

    @classmethod
    def at(cls, buckets: Sequence[Bucket], groups: Sequence[Group], used: Used | None) -> Look:
        """Waits for the squares of these buckets, whose update commits. `used` knows which
        parameters have gradients; None: all do.
        """
        squares: dict[int, Tensor] = {}
        nonfinite = 0
        for bucket in buckets:
            found, count = bucket.squares()
            ids = (id(each.tensor) for each in bucket.parameters)
            squares.update(zip(ids, found, strict=True))
            nonfinite += count
        if used is not None:
            having = used.answer()
            squares = {key: each for key, each in squares.items() if key in having}
            buckets = [b for b in buckets if id(b.parameters[0].tensor) in having]
        return cls(_total(groups, squares), nonfinite, buckets)


def _total(groups: Sequence[Group], squares: Mapping[int, Tensor]) -> float:
    """Adds up squares by parameter's id and granule, in the order of a worker's own optimizer."""
    sums = []
    for group in groups:
        found = [squares[id(tensor)] for tensor in group["params"] if id(tensor) in squares]
        if found:
            sums.append(_C.total_of_squares(torch.cat(found)))
    return functools.reduce(operator.add, sums, 0.0)
