"""Lists the parameter shapes of well-known models in the order of their registration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_RESNET50_BLOCKS = (3, 4, 6, 3)
_BERT_VOCABULARY, _BERT_POSITIONS, _BERT_WIDTH, _BERT_LAYERS = 30522, 512, 768, 12
_SWIN_BLOCKS, _SWIN_HEADS, _SWIN_WIDTH, _SWIN_WINDOW = (2, 2, 6, 2), (3, 6, 12, 24), 96, 7
_CLASSES = 1000


def shapes_of(model: str) -> list[Shape]:
    return list(MODELS[model]())


def parse_shapes(text: str) -> list[Shape]:
    """Reads a model's name, or shapes as in 64x3x7x7,1000x2048. Raises ValueError."""
    if text in MODELS:
        return shapes_of(text)
    try:
        found = [tuple(int(extent) for extent in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        found = []
    if not found or any(extent < 1 for shape in found for extent in shape):
        raise ValueError(
            f"{text!r} is neither one of {', '.join(MODELS)} nor shapes such as 64x3x7x7,1000x2048"
        )
    return found


def count_elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def tensors_of(shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns zeros of these shapes, in one piece of memory."""
    import torch

    parts = torch.zeros(count_elements(shapes)).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def transformer_blocks(width: int, blocks: int) -> list[list[Shape]]:
    """Returns the blocks of a transformer: attention, two linear layers, two norms."""
    return [_block(width)] * blocks


def _block(width: int, table: Sequence[Shape] = ()) -> list[Shape]:
    """Returns norm, attention, norm and two linear layers; `table` comes before the attention."""
    heads = _linear(width, 3 * width) + _linear(width, width)
    return [*_norm(width), *table, *heads, *_norm(width), *_mlp(width)]


def _mlp(width: int) -> list[Shape]:
    return _linear(width, 4 * width) + _linear(4 * width, width)


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def _linear(inputs: int, outputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def _conv(inputs: int, outputs: int, kernel: int) -> list[Shape]:
    """Returns a convolution without bias, and the following batch norm."""
    return [(outputs, inputs, kernel, kernel), *_norm(outputs)]


def _resnet50() -> Iterator[Shape]:
    yield from _conv(3, 64, 7)
    inputs = 64
    for stage, blocks in enumerate(_RESNET50_BLOCKS):
        width = 64 << stage
        for block in range(blocks):
            yield from _conv(inputs, width, 1)
            yield from _conv(width, width, 3)
            yield from _conv(width, 4 * width, 1)
            if block == 0:
                yield from _conv(inputs, 4 * width, 1)
            inputs = 4 * width
    yield from _linear(inputs, _CLASSES)


def _bert_base() -> Iterator[Shape]:
    """Returns bert-base-uncased: the encoder with its pooler."""
    width = _BERT_WIDTH
    yield from ((rows, width) for rows in (_BERT_VOCABULARY, _BERT_POSITIONS, 2))
    yield from _norm(width)
    for _ in range(_BERT_LAYERS):
        yield from 4 * _linear(width, width)  # query, key, value, output
        yield from [*_norm(width), *_mlp(width), *_norm(width)]
    yield from _linear(width, width)


def _swin_t() -> Iterator[Shape]:
    width = _SWIN_WIDTH
    yield from ((width, 3, 4, 4), (width,), *_norm(width))
    for stage, (blocks, heads) in enumerate(zip(_SWIN_BLOCKS, _SWIN_HEADS, strict=True)):
        if stage > 0:  # merging of patches
            yield from ((2 * width, 4 * width), *_norm(4 * width))
            width *= 2
        for _ in range(blocks):
            yield from _block(width, [((2 * _SWIN_WINDOW - 1) ** 2, heads)])
    yield from _norm(width)
    yield from _linear(width, _CLASSES)


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "swin-t": _swin_t,
}
