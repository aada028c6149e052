"""Writes bits as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 4  # bytes; what is written lies behind one another
_PLACES = torch.arange(8, dtype=torch.uint8, device="cpu")


def size_of(bits: int) -> int:
    """Returns how many bytes so many bits take."""
    return WORD * -(-bits // (8 * WORD))


def pack(bits: Tensor) -> Tensor:
    """Returns the bytes of bits, the first one in the lowest bit of the first byte."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % (8 * WORD)))
    return (padded.view(-1, 8) << _PLACES).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Returns the bits of whole words."""
    return (packed.unsqueeze(1) >> _PLACES & 1).flatten().bool()
