"""Encodes what sharded models send: parameters for all, gradients for their owners.

A codec here knows the tensors of a *row*, which is one rank's shard of a unit: their elements one
after the other, float32. It makes bytes of rows, all rows the same number, and rows of bytes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

BLOCK = 256  # elements with a common scale
SMALL = 1024  # tensors with fewer elements stay as they are in int8
_T = TypeVar("_T")
_FLOAT = 4
_BLOCK_BYTES = _FLOAT + BLOCK
_LARGEST_CODE = 125.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Piece(NamedTuple):
    """A rank's shard of a tensor, filled up to the size of the largest one."""

    elements: int
    of: int  # elements of the whole tensor


class RowCodec(Protocol):
    """Makes rows of bytes, uint8 [rows, row_bytes], of rows of values, [rows, elements]."""

    elements: int
    row_bytes: int
    residual_elements: int  # of a row; 0: nothing is held back

    def encode(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the bytes of rows of floats of any type.

        `residual`, float32 [rows, residual_elements], is what was held back before; it becomes what
        is held back now.
        """

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Writes the values of `payload` to `out`, rows of floats of any type."""


class Parts:
    """A row's codec in parts, each of some tensors that follow each other, so that one part can be
    encoded or decoded while another one is on its way.

    There are MOST at most, and so many that a row's bytes of each are about PART at least.
    """

    PART, MOST = 128 << 10, 4

    def __init__(
        self, make: Callable[[Sequence[Piece]], RowCodec], pieces: Sequence[Piece]
    ) -> None:
        whole = make(pieces)
        count = max(1, min(self.MOST, whole.row_bytes // self.PART))
        groups: list[list[Piece]] = [[]]
        taken = 0
        for piece in pieces:
            middle = taken + piece.elements / 2
            if groups[-1] and piece.elements and middle > whole.elements * len(groups) / count:
                groups.append([])
            groups[-1].append(piece)
            taken += piece.elements
        self.codecs = [make(group) for group in groups]
        self.elements = whole.elements
        self.residual_elements = whole.residual_elements

    @property
    def itemsize(self) -> int:
        """How many bytes an element takes if it is only cast; 0: it is not."""
        first = self.codecs[0]
        return first.itemsize if isinstance(first, Cast) else 0

    def split(self, rows: Tensor) -> list[Tensor]:
        """Returns views of the columns of each part, of [rows, elements]."""
        return list(rows.split([codec.elements for codec in self.codecs], dim=1))

    def split_residual(self, residual: Tensor) -> list[Tensor]:
        """Returns views of the columns of each part, of [rows, residual_elements]."""
        return list(residual.split([codec.residual_elements for codec in self.codecs], dim=1))


class Cast:
    """Rounds each element to a shorter type."""

    residual_elements = 0

    def __init__(self, dtype: torch.dtype, pieces: Sequence[Piece]) -> None:
        self._dtype = dtype
        self.itemsize = dtype.itemsize
        self.elements = sum(piece.elements for piece in pieces)
        self.row_bytes = self.elements * dtype.itemsize

    def encode(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self._dtype))


class Blocks:
    """Writes blocks of 256 elements as whole numbers from -125 to 125 with a float32 scale.

    Each tensor begins with a block of its own, and small tensors are sent as they are, before all
    blocks. A block is 4 bytes of scale, the largest magnitude / 125, and 256 bytes. A block with an
    element that is not finite has the scale NaN, decodes to NaN throughout and leaves what was held
    back as it was. Roundings are to nearest, ties to even.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.elements = sum(piece.elements for piece in pieces)
        self._sizes = [piece.elements for piece in pieces]
        self._exact = [piece.of < SMALL for piece in pieces]
        self._padded = [-(-n // BLOCK) * BLOCK for n in self._of_kind(self._sizes, exact=False)]
        self.residual_elements = sum(self._padded)
        self._exact_bytes = _FLOAT * sum(self._of_kind(self._sizes, exact=True))
        self._blocks = self.residual_elements // BLOCK
        self.row_bytes = self._exact_bytes + _BLOCK_BYTES * self._blocks

    def encode(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        pieces = rows.split(self._sizes, dim=1)
        payload = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8, device=rows.device)
        exact, scales, codes = self._parts(payload)
        _copy(self._of_kind(pieces, exact=True), exact)
        values = torch.zeros(len(rows), self.residual_elements, device=rows.device)
        _copy(self._of_kind(pieces, exact=False), self._narrowed(values))
        if residual is not None:
            values += residual
        blocks = values.unflatten(1, (self._blocks, BLOCK))
        _quantize(blocks, scales, codes)
        if residual is not None:
            held = residual.view_as(blocks)
            left = blocks.sub_(codes * scales)
            torch.where(scales.isfinite(), left, held, out=held)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        exact, scales, codes = self._parts(payload)
        pieces = out.split(self._sizes, dim=1)
        _copy(exact, self._of_kind(pieces, exact=True))
        _copy(self._narrowed((codes * scales).flatten(1)), self._of_kind(pieces, exact=False))

    def _parts(self, payload: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns views: the small tensors, scales [rows, blocks, 1], codes [rows, blocks, 256]."""
        sizes = self._of_kind(self._sizes, exact=True)
        exact = payload[:, : self._exact_bytes].view(torch.float32)
        blocks = payload[:, self._exact_bytes :].unflatten(1, (self._blocks, _BLOCK_BYTES))
        scales = blocks[..., :_FLOAT].view(torch.float32)
        return list(exact.split(sizes, dim=1)), scales, blocks[..., _FLOAT:].view(torch.int8)

    def _narrowed(self, blocks: Tensor) -> list[Tensor]:
        """Returns views of the tensors in [rows, residual_elements], without what fills up."""
        sizes = self._of_kind(self._sizes, exact=False)
        parts = blocks.split(self._padded, dim=1)
        return [part[:, :size] for part, size in zip(parts, sizes, strict=True)]

    def _of_kind(self, values: Sequence[_T], *, exact: bool) -> list[_T]:
        return [one for one, kind in zip(values, self._exact, strict=True) if kind == exact]


def _quantize(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Writes the scales and codes of blocks of float32."""
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = torch.maximum(-low, high) / _LARGEST_CODE
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, scale.reciprocal())
    scales.copy_(scale)
    codes.copy_((blocks * inverse).nan_to_num_(0.0).round_())


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
