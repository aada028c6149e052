"""Encodes what sharded models send: parameters for all, gradients for their owners.

A codec here knows the tensors of a *row*, which is one rank's shard of a unit: their elements one
after the other, float32. It makes bytes of rows, all rows the same number, and rows of bytes again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from thalweg import _C

BLOCK = 256  # elements with a common scale
SMALL = 1024  # tensors with fewer elements stay as they are in int8
_T = TypeVar("_T")
_FLOAT = 4
_BLOCK_BYTES = _FLOAT + BLOCK
_LARGEST_CODE = 125
_INFINITY, _NAN = 126, -128  # their codes
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
    """Writes tensors in the wire format int8 (docs/codecs.md): blocks of 256 elements, as whole
    numbers from -125 to 125 with a float32 scale.

    Each tensor begins with a block of its own and its last one is filled up with zeros; small
    tensors are sent as they are, before all blocks. An element that is not finite arrives as such
    and leaves what was held back of it as it was.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.elements = sum(piece.elements for piece in pieces)
        self._sizes = [piece.elements for piece in pieces]
        self._exact = [piece.of < SMALL for piece in pieces]
        self._padded = [-(-n // BLOCK) * BLOCK for n in self._of_kind(self._sizes, exact=False)]
        self.residual_elements = sum(self._padded)
        self._exact_bytes = _FLOAT * sum(self._of_kind(self._sizes, exact=True))
        self.row_bytes = self._exact_bytes + _BLOCK_BYTES * (self.residual_elements // BLOCK)
        columns = [0, *itertools.accumulate(self._sizes)]
        placed = list(zip(columns, self._sizes, strict=False))
        self._kernel = _C.Int8Blocks(self._of_kind(placed, exact=False))

    def encode(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        payload = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8, device=rows.device)
        exact, blocks = self._parts(payload)
        _copy(self._of_kind(rows.split(self._sizes, dim=1), exact=True), exact)
        if rows.is_cpu:
            self._kernel.encode(rows.float(), residual, blocks)
        else:
            self.encode_by_torch(rows, residual, blocks)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        exact, blocks = self._parts(payload)
        _copy(exact, self._of_kind(out.split(self._sizes, dim=1), exact=True))
        if out.is_cpu:
            self._kernel.decode(blocks, out)
        else:
            self.decode_by_torch(blocks, out)

    def encode_by_torch(self, rows: Tensor, residual: Tensor | None, blocks: Tensor) -> None:
        """Gives the kernel's bits with torch's operations, on any device."""
        values = torch.zeros(len(rows), self.residual_elements, device=rows.device)
        _copy(self._of_kind(rows.split(self._sizes, dim=1), exact=False), self._narrowed(values))
        if residual is not None:
            values += residual
        values = values.unflatten(1, (-1, BLOCK))
        scales, codes = _scales_and_codes(blocks)
        _quantize(values, scales, codes)
        if residual is not None:
            held = residual.unflatten(1, (-1, BLOCK))
            torch.where(values.isfinite(), values - codes * scales, held, out=held)

    def decode_by_torch(self, blocks: Tensor, out: Tensor) -> None:
        """Gives the kernel's bits with torch's operations, on any device."""
        scales, codes = _scales_and_codes(blocks)
        numbers = codes.float()
        infinite = torch.where(numbers.abs() == _INFINITY, numbers.sign() * torch.inf, torch.nan)
        values = torch.where(numbers.abs() <= _LARGEST_CODE, numbers * scales, infinite)
        values = torch.where(scales.isfinite(), values, torch.nan).flatten(1)
        pieces = out.split(self._sizes, dim=1)
        _copy(self._narrowed(values), self._of_kind(pieces, exact=False))

    def _parts(self, payload: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns views: the small tensors, and the bytes of all blocks."""
        exact = payload[:, : self._exact_bytes].view(torch.float32)
        sizes = self._of_kind(self._sizes, exact=True)
        return list(exact.split(sizes, dim=1)), payload[:, self._exact_bytes :]

    def _narrowed(self, blocks: Tensor) -> list[Tensor]:
        """Returns views of the tensors in [rows, residual_elements], without what fills up."""
        sizes = self._of_kind(self._sizes, exact=False)
        parts = blocks.split(self._padded, dim=1)
        return [part[:, :size] for part, size in zip(parts, sizes, strict=True)]

    def _of_kind(self, values: Sequence[_T], *, exact: bool) -> list[_T]:
        return [one for one, kind in zip(values, self._exact, strict=True) if kind == exact]


def _scales_and_codes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views: scales [rows, blocks, 1], float32, and codes [rows, blocks, 256], int8."""
    each = blocks.unflatten(1, (-1, _BLOCK_BYTES))
    return each[..., :_FLOAT].view(torch.float32), each[..., _FLOAT:].view(torch.int8)


def _quantize(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Writes the scales and codes of blocks of float32."""
    magnitudes = torch.where(values.isfinite(), values.abs(), 0.0)
    # On a GPU torch divides by a number as it multiplies by its reciprocal, which rounds twice.
    divisor = magnitudes.new_full((1,), _LARGEST_CODE)
    scale = magnitudes.amax(dim=-1, keepdim=True) / divisor
    scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, scale.reciprocal())
    scales.copy_(scale)
    # The product of two float32 is exact in float64: it is rounded once.
    rounded = (values.double() * inverse.double()).round_()
    rounded = torch.where(values.isinf(), values.sign() * _INFINITY, rounded)
    codes.copy_(torch.where(values.isnan(), _NAN, rounded))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
