"""Counts the bytes of a model's compressed gradients by the documented rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from thalweg.codecs import Auto, Codec, Lossy, PowerSGD
from thalweg.policy import SMALL_ELEMS
from thalweg_bench.shapes import Shape

# With warm start and error feedback torch's hook cannot compress any earlier.
TORCH_START = 2
_DDP_STEPS = 2  # DDP rebuilds its buckets after the first one
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def shorten(codec: Codec) -> str:
    """Returns the text form without keys that have their defaults; thalweg.codecs.parse reads
    it.
    """
    arguments = codec.spec().partition(":")[2].split(",")
    defaults = type(codec)().spec().partition(":")[2].split(",")
    given = [key for key, default in zip(arguments, defaults, strict=True) if key != default]
    return f"{codec.name}:{','.join(given)}" if given else codec.name


def warm_up_steps(codec: Codec) -> int:
    """Returns the steps after which nothing happens for the first time, also in torch's hook."""
    if not isinstance(codec, PowerSGD | Lossy | Auto):
        return _DDP_STEPS
    return max(codec.start_iter, TORCH_START) + _DDP_STEPS


def wire_bytes(codec: Codec, shapes: Iterable[Shape]) -> int:
    """Returns the bytes that a node sends in a round, and receives, once compressed; not for
    auto.
    """
    if isinstance(codec, Lossy) and codec.block is not None:
        return sum(_bytes_in_blocks(codec.block, math.prod(shape)) for shape in shapes)
    if not isinstance(codec, PowerSGD):
        return _ITEM_BYTES[codec.name] * sum(math.prod(shape) for shape in shapes)
    elements = 0
    for shape in shapes:
        rank = _rank(codec, shape)
        rows, columns = _matrix(shape)
        elements += (rows + columns) * rank if rank else rows * columns
    return _ITEM_BYTES[codec.wire] * elements


def compressed_bytes(codec: Codec, shapes: Sequence[Shape]) -> int:
    """Returns the bytes of fp32 gradients that are sent compressed."""
    is_compressed = [not isinstance(codec, PowerSGD) or _rank(codec, shape) for shape in shapes]
    return 4 * sum(math.prod(s) for s, yes in zip(shapes, is_compressed, strict=True) if yes)


def passes(codec: Codec) -> int:
    """Returns how often a compressed gradient's memory is at least read or written, both ways."""
    # The gradient and its residual are read, and in the end the result and the remainder are
    # written. Factors also need their sum: it is written, and read for the second factor and for
    # the remainder.
    return 7 if isinstance(codec, PowerSGD) else 4


def _bytes_in_blocks(block: tuple[int, int], elements: int) -> int:
    if elements < SMALL_ELEMS:
        return _ITEM_BYTES["fp16"] * elements
    block_elements, block_bytes = block  # the last one of a bucket may be shorter
    return math.ceil(elements / block_elements) * block_bytes


def _matrix(shape: Shape) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def _rank(codec: PowerSGD, shape: Shape) -> int:
    """Returns the rank of the factors; 0: the gradient is not compressed."""
    rows, columns = _matrix(shape)
    rank = min(rows, columns, codec.rank)
    gains = (rows + columns) * rank * codec.min_compression_rate < rows * columns
    return rank if min(rows, columns) > 1 and gains else 0
