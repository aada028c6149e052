"""Writes a worker's changes as few entries: their places, and two bits of value for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.codecs import Sparse
from thalweg.ps._bits import pack, unpack

_LEVEL_BYTES = 8  # two float32


class Entries:
    """The codec Sparse for tensors that lie one after the other.

    Of each tensor, the ceil(ratio n) elements of largest magnitude are sent. A value is one of
    four: plus or minus the mean of the tensor's entries that are above their mean magnitude, or of
    those that are not. A payload has always the same number of bytes: the two levels of each
    tensor, then bits: the signs of all entries, whether they have the higher level, and their
    places in the order in which they rise (Elias and Fano's code): the `low` lowest bits of each,
    and for entry i of place p a 1 at i + p / 2^low.

    A tensor with an element that is not finite decodes to NaN at its entries.
    """

    def __init__(self, shapes: Sequence[torch.Size], codec: Sparse) -> None:
        self._sizes = [shape.numel() for shape in shapes]
        self._counts = [math.ceil(codec.ratio * size) for size in self._sizes]
        self.elements, self._entries = sum(self._sizes), sum(self._counts)
        self._low = (self.elements // self._entries).bit_length() - 1
        self._high_bits = self._entries + (self.elements >> self._low) + 1

    def encode(self, changes: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        places, levels, begin = [], torch.empty(len(self._sizes), 2, device="cpu"), 0
        for row, (part, count) in enumerate(
            zip(changes.split(self._sizes), self._counts, strict=True)
        ):
            chosen = part.abs().topk(count, sorted=False).indices.sort().values
            places.append(chosen + begin)
            levels[row] = _levels(part[chosen].abs())
            begin += len(part)
        at = torch.cat(places)
        values = changes[at]
        of_entry = levels.repeat_interleave(torch.tensor(self._counts, device="cpu"), dim=0)
        # Midway between the levels lies what is as close to either.
        is_high = values.abs() > of_entry.mean(1)
        rest = changes.clone()
        rest[at] -= self._values(values < 0, is_high, of_entry)
        return self._write(at, values < 0, is_high, levels), rest

    def add(self, payload: Tensor, turn: int, total: Tensor) -> None:
        places, values = self.decode(payload)
        total[places] += values  # no place comes twice

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of all entries, none of them twice, and their values."""
        split = _LEVEL_BYTES * len(self._sizes)
        levels = payload[:split].view(torch.float32).view(-1, 2)
        bits = unpack(payload[split:])
        signs, is_high, *low = bits[: (2 + self._low) * self._entries].view(-1, self._entries)
        begin = (2 + self._low) * self._entries
        high = bits[begin : begin + self._high_bits].nonzero().squeeze(1)
        if len(high) != self._entries:
            raise RuntimeError(
                f"thalweg: a worker's changes have {len(high)} entries, expected {self._entries}"
            )
        places = (high - torch.arange(self._entries, device="cpu")) << self._low
        for number, plane in enumerate(low):
            places += plane.long() << number
        of_entry = levels.repeat_interleave(torch.tensor(self._counts, device="cpu"), dim=0)
        return places, self._values(signs, is_high, of_entry)

    def _write(self, places: Tensor, signs: Tensor, is_high: Tensor, levels: Tensor) -> Tensor:
        high = torch.zeros(self._high_bits, dtype=torch.bool, device="cpu")
        high[(places >> self._low) + torch.arange(self._entries, device="cpu")] = True
        low = [(places >> number & 1).bool() for number in range(self._low)]
        bits = torch.cat([signs, is_high, *low, high])
        return torch.cat([levels.flatten().view(torch.uint8), pack(bits)])

    @staticmethod
    def _values(signs: Tensor, is_high: Tensor, levels: Tensor) -> Tensor:
        magnitudes = torch.where(is_high, levels[:, 1], levels[:, 0])
        return torch.where(signs, -magnitudes, magnitudes)


def _levels(magnitudes: Tensor) -> Tensor:
    """Returns the lower and the higher level for these magnitudes; NaN where one is not finite."""
    mean = magnitudes.mean()
    is_high = magnitudes > mean
    # All may be high, since the mean is rounded, or none.
    low, high = (magnitudes[own].mean() if own.any() else mean for own in (~is_high, is_high))
    levels = torch.stack([low, high])
    return torch.where(mean.isfinite(), levels, torch.nan)
