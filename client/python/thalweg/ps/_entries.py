"""Writes a worker's changes as few entries: their places, and two bits of value for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.codecs import Sparse

_LEVEL_BYTES = 8  # two float32
_WORD = 4  # bytes; payloads lie behind one another
_BITS = torch.arange(8, dtype=torch.uint8, device="cpu")


class Entries:
    """The codec Sparse for tensors that lie one after the other.

    Of each tensor, the ceil(ratio n) elements of largest magnitude are sent; what is not sent, and
    what rounding loses, is held back for the next time. A value is one of four: plus or minus the
    mean of the tensor's entries that are above their mean magnitude, or of those that are not. A
    payload has always the same number of bytes: the two levels of each tensor, then bits: the
    signs of all entries, whether they have the higher level, and their places in the order in which
    they rise (Elias and Fano's code): the `low` lowest bits of each, and for entry i of place p a 1
    at i + p / 2^low.

    A tensor with an element that is not finite decodes to NaN at its entries, and what was held
    back of it stays.
    """

    def __init__(self, sizes: Sequence[int], codec: Sparse) -> None:
        self._sizes = list(sizes)
        self._counts = [math.ceil(codec.ratio * size) for size in sizes]
        self._feedback = codec.feedback
        self.elements, self._entries = sum(self._sizes), sum(self._counts)
        self._low = (self.elements // self._entries).bit_length() - 1
        self._high_bits = self._entries + (self.elements >> self._low) + 1
        bits = (2 + self._low) * self._entries + self._high_bits
        self.payload_bytes = _LEVEL_BYTES * len(self._sizes) + _WORD * -(-bits // (8 * _WORD))
        self.held = torch.zeros(self.elements, device="cpu")  # back, of the changes so far

    def encode(self, changes: Tensor) -> Tensor:
        """Returns the payload, uint8, of float32 changes and of what was held back of earlier ones;
        what it does not have is held back.
        """
        whole = changes + self._feedback * self.held  # each rounded once
        places, levels, begin = [], torch.empty(len(self._sizes), 2, device="cpu"), 0
        for row, (part, count) in enumerate(
            zip(whole.split(self._sizes), self._counts, strict=True)
        ):
            chosen = part.abs().topk(count, sorted=False).indices.sort().values
            places.append(chosen + begin)
            levels[row] = _levels(part[chosen].abs())
            begin += len(part)
        at = torch.cat(places)
        values = whole[at]
        of_entry = levels.repeat_interleave(torch.tensor(self._counts, device="cpu"), dim=0)
        # Midway between the levels lies what is as close to either.
        is_high = values.abs() > of_entry.mean(1)
        payload = self._write(at, values < 0, is_high, levels)
        whole[at] -= self._values(values < 0, is_high, of_entry)
        kept = levels.isfinite().all(1).repeat_interleave(torch.tensor(self._sizes, device="cpu"))
        self.held = torch.where(kept, whole, self.held)
        return payload

    def decode(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of all entries, none of them twice, and their values."""
        split = _LEVEL_BYTES * len(self._sizes)
        levels = payload[:split].view(torch.float32).view(-1, 2)
        bits = _unpack(payload[split:])
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

    def split_held(self) -> list[Tensor]:
        """Returns what is held back of each tensor, as views."""
        return list(self.held.split(self._sizes))

    def _write(self, places: Tensor, signs: Tensor, is_high: Tensor, levels: Tensor) -> Tensor:
        high = torch.zeros(self._high_bits, dtype=torch.bool, device="cpu")
        high[(places >> self._low) + torch.arange(self._entries, device="cpu")] = True
        low = [(places >> number & 1).bool() for number in range(self._low)]
        bits = torch.cat([signs, is_high, *low, high])
        return torch.cat([levels.flatten().view(torch.uint8), _pack(bits)])

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


def _pack(bits: Tensor) -> Tensor:
    """Returns the bytes of bits, the first one in the lowest bit of the first byte."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % (8 * _WORD)))
    return (padded.view(-1, 8) << _BITS).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    return (packed.unsqueeze(1) >> _BITS & 1).flatten().bool()
