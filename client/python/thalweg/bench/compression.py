"""What compression makes of a model's gradients, counted by its documented rules."""

from __future__ import annotations

import math
from collections.abc import Iterable

from thalweg.bench.shapes import Shape
from thalweg.codecs import Codec, PowerSGD

# With warm start and error feedback torch's hook cannot compress any earlier.
TORCH_START = 2
_DDP_STEPS = 2  # DDP cuts its buckets anew after the first one
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def shorten(codec: Codec) -> str:
    """The text form without the keys that have their defaults; thalweg.codecs.parse reads it."""
    arguments = codec.spec().partition(":")[2].split(",")
    defaults = type(codec)().spec().partition(":")[2].split(",")
    given = [key for key, default in zip(arguments, defaults, strict=True) if key != default]
    return f"{codec.name}:{','.join(given)}" if given else codec.name


def warm_up_steps(codec: Codec) -> int:
    """After which nothing is done for the first time, neither here nor in torch's hook."""
    if not isinstance(codec, PowerSGD):
        return _DDP_STEPS
    return max(codec.start_iter, TORCH_START) + _DDP_STEPS


def wire_bytes(codec: Codec, shapes: Iterable[Shape]) -> int:
    """That a node sends in a round, and receives, once compression has started."""
    if not isinstance(codec, PowerSGD):
        return _ITEM_BYTES[codec.name] * sum(math.prod(shape) for shape in shapes)
    elements = 0
    for shape in shapes:
        rank = _rank(codec, shape)
        rows, columns = _matrix(shape)
        elements += (rows + columns) * rank if rank else rows * columns
    return _ITEM_BYTES[codec.wire] * elements


def compressed_bytes(codec: PowerSGD, shapes: Iterable[Shape]) -> int:
    """Of fp32 gradients that cross the network as factors."""
    return 4 * sum(math.prod(shape) for shape in shapes if _rank(codec, shape))


def _matrix(shape: Shape) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def _rank(codec: PowerSGD, shape: Shape) -> int:
    """Of the factors; 0: the gradient is not compressed."""
    rows, columns = _matrix(shape)
    rank = min(rows, columns, codec.rank)
    gains = (rows + columns) * rank * codec.min_compression_rate < rows * columns
    return rank if min(rows, columns) > 1 and gains else 0
