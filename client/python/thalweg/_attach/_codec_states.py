"""Reads what a node's codec carries from step to step: the bytes that
server/sidecar/codec/parameter_states.h describes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

_MAGIC = 0x33535754  # "TWS3"
_FLOAT = 4
_HEADER = struct.Struct("<II")  # magic, parameters
_NAME = struct.Struct("<I")  # bytes of the name
_SIZES = struct.Struct("<QQQQ")  # rounds; elements of factor, residual and shard residual


class _Sizes(NamedTuple):
    rounds: int
    factor: int  # elements, as are the others
    residual: int
    shard_residual: int


class _Parameter(NamedTuple):
    name: bytes
    sizes: _Sizes
    factor: bytes | memoryview
    held_back: bytes | memoryview


def nothing() -> bytes:
    """Returns the state of a codec that has not begun with any parameter."""
    return _join([])


def without_residuals(state: bytes) -> bytes:
    """Returns what is equal on all nodes: each parameter's count of rounds, and its factor.

    Raises ValueError for bytes that are no codec state.
    """
    return _join(
        one._replace(sizes=one.sizes._replace(residual=0, shard_residual=0), held_back=b"")
        for one in _parameters(state)
    )


def with_residuals(shared: bytes, whole: bytes) -> bytes:
    """Returns the counts and factors of one state with what another one of the same parameters has
    held back. Raises ValueError for states that do not fit, and bytes that are no codec state.
    """
    held = {one.name: one for one in _parameters(whole)}
    mine = _parameters(shared)
    if held.keys() != {one.name for one in mine}:
        raise ValueError("thalweg: the codec states are of different parameters")
    return _join(
        one._replace(
            sizes=_Sizes(*one.sizes[:2], *held[one.name].sizes[2:]),
            held_back=held[one.name].held_back,
        )
        for one in mine
    )


def rounds_of(state: bytes) -> int:
    """Returns in how many rounds the parameter that has seen the most has been reduced."""
    return max((one.sizes.rounds for one in _parameters(state)), default=0)


def _parameters(state: bytes) -> list[_Parameter]:
    """Raises ValueError for bytes that are no codec state."""
    whole = memoryview(state)
    result = []
    try:
        magic, count = _HEADER.unpack_from(whole)
        if magic != _MAGIC:
            raise ValueError("thalweg: these bytes are no codec state of this release")
        at = _HEADER.size
        for _ in range(count):
            (name_bytes,) = _NAME.unpack_from(whole, at)
            name_at = at + _NAME.size
            sizes_at = name_at + name_bytes
            sizes = _Sizes(*_SIZES.unpack_from(whole, sizes_at))
            factor_at = sizes_at + _SIZES.size
            held_at = factor_at + _FLOAT * sizes.factor
            at = held_at + _FLOAT * (sizes.residual + sizes.shard_residual)
            result.append(
                _Parameter(
                    bytes(whole[name_at:sizes_at]),
                    sizes,
                    whole[factor_at:held_at],
                    whole[held_at:at],
                )
            )
    except struct.error as error:
        raise ValueError(f"thalweg: codec state is cut off: {error}") from None
    if at != len(whole):
        raise ValueError(
            f"thalweg: codec state has {len(whole)} bytes, expected {at} for {count} parameters"
        )
    return result


def _join(parameters: Iterable[_Parameter]) -> bytes:
    parts: list[bytes | memoryview] = []
    for name, sizes, factor, held_back in parameters:
        parts += [_NAME.pack(len(name)), name, _SIZES.pack(*sizes), factor, held_back]
    return b"".join([_HEADER.pack(_MAGIC, len(parts) // 5), *parts])
