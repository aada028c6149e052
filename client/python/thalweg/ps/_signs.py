"""Writes a part of a worker's changes as signs and mean magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.codecs import Signs
from thalweg.ps._bits import pack, size_of, unpack

_SHORTEST, _LONGEST = 32, 4096  # elements of a block


class SignBlocks:
    """The codec Signs for tensors that lie one after the other.

    Each tensor is cut into blocks of `block_length()` elements, the last of which may be shorter.
    The blocks of all tensors are numbered. In turn t, those are sent whose number is t modulo the
    parts: the sign bits of their elements, and then the mean magnitude of each block, in bfloat16.

    A block with an element that is not finite decodes to no finite ones.
    """

    def __init__(self, shapes: Sequence[torch.Size], codec: Signs) -> None:
        self._parts = codec.parts
        self._stretches = list(_stretches(shapes))
        self.elements = sum(shape.numel() for shape in shapes)

    def encode(self, changes: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        rest = changes.clone()
        bits, magnitudes = [], []
        for blocks in self._sent(rest, turn):
            bits.append(blocks.signbit().flatten())
            magnitudes.append(blocks.abs().mean(1).bfloat16())
            blocks.sub_(magnitudes[-1].float().unsqueeze(1).copysign(blocks))
        means = torch.cat(magnitudes)
        padded = torch.nn.functional.pad(means, (0, len(means) % 2))
        return torch.cat([pack(torch.cat(bits)), padded.view(torch.uint8)]), rest

    def add(self, payload: Tensor, turn: int, total: Tensor) -> None:
        sent = list(self._sent(total, turn))
        split = size_of(sum(blocks.numel() for blocks in sent))
        if not split:
            return  # no block has its turn
        bits, means = unpack(payload[:split]), payload[split:].view(torch.bfloat16).float()
        for blocks in sent:
            signs, bits = bits[: blocks.numel()].view_as(blocks), bits[blocks.numel() :]
            magnitudes, means = means[: len(blocks)].unsqueeze(1), means[len(blocks) :]
            blocks.add_(torch.where(signs, -magnitudes, magnitudes))

    def _sent(self, values: Tensor, turn: int) -> Iterator[Tensor]:
        """Returns the blocks of that turn by their stretch, as views [blocks, elements]."""
        for stretch in self._stretches:
            end = stretch.begin + stretch.blocks * stretch.length
            all_ = values[stretch.begin : end].view(stretch.blocks, stretch.length)
            yield all_[(turn - stretch.number) % self._parts :: self._parts]


class _Stretch(NamedTuple):
    """Blocks of equal length, one after the other."""

    begin: int  # elements before them
    number: int  # blocks before them
    blocks: int
    length: int


def _stretches(shapes: Sequence[torch.Size]) -> Iterator[_Stretch]:
    begin, number = 0, 0
    for shape in shapes:
        elements, length = shape.numel(), block_length(shape)
        whole, last = divmod(elements, length)
        if whole:
            yield _Stretch(begin, number, whole, length)
        if last:
            yield _Stretch(begin + whole * length, number + whole, 1, last)
        begin += elements
        number += whole + (last > 0)


def block_length(shape: torch.Size) -> int:
    """Returns the length of a row, which is what lies behind one index of the first dimension, or
    all of a vector; several of them if they are short, an equal part of one if it is long.
    """
    row = shape[1:].numel() if len(shape) > 1 else shape.numel()
    if row < _SHORTEST:
        return row * math.ceil(_SHORTEST / row)
    return math.ceil(row / math.ceil(row / _LONGEST))
