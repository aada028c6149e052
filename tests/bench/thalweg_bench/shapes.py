"""Lists the parameter shapes of well-known models in the order of their registration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

Shape = tuple[int, ...]

_RESNET50_BLOCKS = (3, 4, 6, 3)
_BERT_VOCABULARY, _BERT_POSITIONS, _BERT_WIDTH, _BERT_LAYERS = 30522, 512, 768, 12
_SWIN_BLOCKS, _SWIN_HEADS, _SWIN_WIDTH, _SWIN_WINDOW = (2, 2, 6, 2), (3, 6, 12, 24), 96, 7
_CLASSES = 1000


def shapes_of(model: str) -> list[Shape]:
    return list(MODELS[model]())


def count_elements(shapes: list[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def transformer_blocks(width: int, blocks: int) -> list[list[Shape]]:
    """Returns the blocks of a transformer: attention, two linear layers, two norms."""
    block = [
        *_norm(width),
        *_linear(width, 3 * width),
        *_linear(width, width),
        *_norm(width),
        *_linear(width, 4 * width),
        *_linear(4 * width, width),
    ]
    return [block] * blocks


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
    for rows in (_BERT_VOCABULARY, _BERT_POSITIONS, 2):
        yield (rows, width)
    yield from _norm(width)
    for _ in range(_BERT_LAYERS):
        for _ in range(4):  # query, key, value, output
            yield from _linear(width, width)
        yield from _norm(width)
        yield from _linear(width, 4 * width)
        yield from _linear(4 * width, width)
        yield from _norm(width)
    yield from _linear(width, width)


def _swin_t() -> Iterator[Shape]:
    width = _SWIN_WIDTH
    yield from ((width, 3, 4, 4), (width,))
    yield from _norm(width)
    for stage, (blocks, heads) in enumerate(zip(_SWIN_BLOCKS, _SWIN_HEADS, strict=True)):
        if stage > 0:  # merging of patches
            yield (2 * width, 4 * width)
            yield from _norm(4 * width)
            width *= 2
        for _ in range(blocks):
            yield from _norm(width)
            yield ((2 * _SWIN_WINDOW - 1) ** 2, heads)
            yield from _linear(width, 3 * width)
            yield from _linear(width, width)
            yield from _norm(width)
            yield from _linear(width, 4 * width)
            yield from _linear(4 * width, width)
    yield from _norm(width)
    yield from _linear(width, _CLASSES)


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "swin-t": _swin_t,
}
