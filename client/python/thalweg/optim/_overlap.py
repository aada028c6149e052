"""Finds parameters in the same memory: threads of a step would write it at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

# A tensor, with where its memory begins and ends.
_Extent = tuple[int, int, Tensor]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Returns where they lie; in each step, so it must not take long."""
    return list(map(Tensor.data_ptr, tensors))


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Returns whether two of the tensors have an element in common."""
    extents = sorted((_extent(t) for t in tensors if t.numel() > 0), key=itemgetter(0))
    return any(len(near) > 1 and _share(near) for near in _neighbours(extents))


def _extent(tensor: Tensor) -> _Extent:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size(), tensor


def _neighbours(extents: Iterable[_Extent]) -> Iterator[list[_Extent]]:
    """Splits extents, which are in order, where none reaches over."""
    near: list[_Extent] = []
    end = 0
    for extent in extents:
        if near and extent[0] >= end:
            yield near
            near = []
        near.append(extent)
        end = max(end, extent[1]) if len(near) > 1 else extent[1]
    yield near


def _share(near: list[_Extent]) -> bool:
    """Returns whether tensors share elements whose extents do: columns of a matrix need not."""
    begin = near[0][0]
    end = max(extent[1] for extent in near)
    width = near[0][2].element_size()
    if any(t.element_size() != width or (at - begin) % width for at, _, t in near):
        return True
    taken = torch.zeros((end - begin) // width, dtype=torch.bool, device="cpu")
    for at, _, tensor in near:
        # A dimension of stride 0 has the same elements again.
        sizes = [1 if by == 0 else n for n, by in zip(tensor.shape, tensor.stride(), strict=True)]
        elements = taken.as_strided(sizes, tensor.stride(), (at - begin) // width)
        if elements.any():
            return True
        elements.fill_(True)
    return False
