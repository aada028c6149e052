"""Computes in one process the means that workers get whose changes cross the network in a codec.

Each class takes the changes of all workers of one parameter, and returns their mean; docs/codecs.md
and docs/parameter-server.md say how. One worker is on each of two nodes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 256
_SMALL = 1024


class Cast:
    """A worker rounds its changes, and a shard the mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, name: str, changes: Sequence[Tensor]) -> Tensor:
        first, *others = (change.to(self._dtype).float() for change in changes)
        for other in others:
            first = first + other
        return (first / len(changes)).to(self._dtype).float()


class Int8:
    """A worker writes whole numbers in blocks with a scale, as does a shard; both hold back what
    that loses. Small parameters are cast to fp16.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Tensor] = {}
        self._small = Cast(torch.float16)

    def __call__(self, name: str, changes: Sequence[Tensor]) -> Tensor:
        if changes[0].numel() < _SMALL:
            return self._small(name, changes)
        first, second = (self._round(name, rank, one) for rank, one in enumerate(changes))
        return self._round(name, -1, (first + second) / 2)

    def _round(self, name: str, who: int, values: Tensor) -> Tensor:
        whole = values + self._held.get((name, who), torch.zeros_like(values))
        flat = torch.zeros(-(-whole.numel() // _BLOCK) * _BLOCK)
        flat[: whole.numel()] = whole.flatten()
        blocks = flat.view(-1, _BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 125
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        # In float64 the products are exact: they are rounded once, as the codec rounds them.
        codes = (blocks.double() * inverse.double()).round().float()
        rounded = codes * scales
        result = rounded.flatten()[: whole.numel()].view_as(whole)
        self._held[name, who] = whole - result
        return result


class SparseMean:
    """Workers send their largest changes, rounded to one of two magnitudes, to each other."""

    def __init__(self, ratio: float, feedback: float) -> None:
        self._ratio, self._feedback = ratio, feedback
        self._held: dict[tuple[str, int], Tensor] = {}

    def __call__(self, name: str, changes: Sequence[Tensor]) -> Tensor:
        first, *others = (self._send(name, rank, one) for rank, one in enumerate(changes))
        for other in others:
            first = first + other
        return first / len(changes)

    def _send(self, name: str, rank: int, change: Tensor) -> Tensor:
        held = self._held.get((name, rank), torch.zeros_like(change))
        whole = (change + self._feedback * held).flatten()
        count = math.ceil(self._ratio * whole.numel())
        smallest = whole.abs().sort(descending=True).values[count - 1]
        is_sent = whole.abs() >= smallest
        assert is_sent.sum() == count  # no ties, so whose order decides does not matter
        magnitudes = whole[is_sent].abs()
        is_high = magnitudes > magnitudes.mean()
        low = magnitudes[~is_high].mean() if not is_high.all() else magnitudes.mean()
        high = magnitudes[is_high].mean() if is_high.any() else low
        nearest = torch.where(magnitudes > torch.stack([low, high]).mean(), high, low)
        sent = torch.zeros_like(whole)
        sent[is_sent] = whole[is_sent].sign() * nearest
        self._held[name, rank] = (whole - sent).view_as(change)
        return sent.view_as(change)
