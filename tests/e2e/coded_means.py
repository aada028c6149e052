"""Computes in one process the means that workers get whose changes cross the network in a codec.

Each class takes the changes of all workers of one parameter, and returns their mean; docs/codecs.md
and docs/parameter-server.md say how. One worker is on each of two nodes.
"""

import math
from collections.abc import Mapping, Sequence

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


class _Own:
    """Workers send a part of their changes to each other, and keep the rest."""

    def __init__(self) -> None:
        self.rests: list[Tensor] = []  # of the last mean, by worker

    def __call__(self, name: str, changes: Sequence[Tensor]) -> Tensor:
        sent = [self._send(name, change) for change in changes]
        self.rests = [change - one for change, one in zip(changes, sent, strict=True)]
        first, *others = sent
        for other in others:
            first = first + other
        return first / len(changes)


class SparseMean(_Own):
    """Workers send their largest changes, rounded to one of two magnitudes."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self._ratio = ratio

    def _send(self, name: str, change: Tensor) -> Tensor:
        whole = change.flatten()
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
        return sent.view_as(change)


class SignMean(_Own):
    """Workers send some of the rows in turn, as signs and a mean magnitude. `rows` has how many
    rows are before each parameter's, and how long they are.
    """

    def __init__(self, parts: int, rows: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        self._parts, self._rows = parts, rows
        self._turns: dict[str, int] = {}

    def __call__(self, name: str, changes: Sequence[Tensor]) -> Tensor:
        mean = super().__call__(name, changes)
        self._turns[name] = self._turns.get(name, 0) + 1
        return mean

    def _send(self, name: str, change: Tensor) -> Tensor:
        before, length = self._rows[name]
        sent = torch.zeros_like(change)
        turn = self._turns.get(name, 0) % self._parts
        for number, (row, to) in enumerate(
            zip(change.flatten().split(length), sent.flatten().split(length), strict=True), before
        ):
            if number % self._parts == turn:
                magnitude = row.abs().mean().bfloat16().float()
                to.copy_(torch.where(row.signbit(), -magnitude, magnitude))
        return sent
