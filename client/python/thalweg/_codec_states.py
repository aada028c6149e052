"""Reads what a node's codec carries from step to step: the bytes that
server/sidecar/codec/parameter_states.h describes.
"""

from __future__ import annotations

import struct

_MAGIC = 0x33535754  # "TWS3"
_FLOAT = 4
_HEADER = struct.Struct("<II")  # magic, parameters
_NAME = struct.Struct("<I")  # bytes of the name
_SIZES = struct.Struct("<QQQQ")  # rounds; elements of factor, residual and shard residual


def without_residuals(state: bytes) -> bytes:
    """Returns what is equal on all nodes: each parameter's count of rounds, and its factor.

    Raises ValueError for bytes that are no codec state.
    """
    whole = memoryview(state)
    try:
        magic, count = _HEADER.unpack_from(whole)
        if magic != _MAGIC:
            raise ValueError("thalweg: these bytes are no codec state of this release")
        parts, at = [bytes(whole[: _HEADER.size])], _HEADER.size
        for _ in range(count):
            (name_bytes,) = _NAME.unpack_from(whole, at)
            sizes_at = at + _NAME.size + name_bytes
            rounds, factor, residual, shard_residual = _SIZES.unpack_from(whole, sizes_at)
            factor_at = sizes_at + _SIZES.size
            residual_at = factor_at + _FLOAT * factor
            parts.append(bytes(whole[at:sizes_at]))
            parts.append(_SIZES.pack(rounds, factor, 0, 0))
            parts.append(bytes(whole[factor_at:residual_at]))
            at = residual_at + _FLOAT * (residual + shard_residual)
    except struct.error as error:
        raise ValueError(f"thalweg: codec state is cut off: {error}") from None
    if at != len(whole):
        raise ValueError(
            f"thalweg: codec state has {len(whole)} bytes, expected {at} for {count} parameters"
        )
    return b"".join(parts)


def rounds_of(state: bytes) -> int:
    """Returns in how many rounds the parameter that has seen the most has been reduced."""
    whole, most = memoryview(state), 0
    _, count = _HEADER.unpack_from(whole)
    at = _HEADER.size
    for _ in range(count):
        (name_bytes,) = _NAME.unpack_from(whole, at)
        at += _NAME.size + name_bytes
        rounds, *elements = _SIZES.unpack_from(whole, at)
        at += _SIZES.size + _FLOAT * sum(elements)
        most = max(most, rounds)
    return most
