"""Defines the types of arguments of `thalweg bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from thalweg import policy
from thalweg.codecs import LOSSY, WIRE_TYPES, Auto, Codec, Lossy, PowerSGD, parse
from thalweg_bench.compression import TORCH_START, shorten
from thalweg_bench.lab import parse_rate
from thalweg_bench.shapes import MODELS, Shape, shapes_of


def number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def size(text: str) -> int:
    value = int(text)
    if value < 4 or value % 4 or value > 4 << 30:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4 from 4 to {4 << 30}")
    return value


def output(text: str) -> Path:
    """Parses a file to write."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def folder(text: str) -> Path:
    """Parses an existing folder."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    return path


def rate(text: str) -> int | None:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rates(text: str) -> list[int | None]:
    """Parses rates separated by commas."""
    return [rate(part) for part in text.split(",")]


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses some of the known names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name for name in text.split(",") if name))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known are {', '.join(known)}"
            )
        return chosen

    return parse


def counts(low: int, high: int) -> Callable[[str], tuple[int, ...]]:
    """Parses numbers from `low` to `high`, separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number(low, high)(part) for part in text.split(",")))

    return parse


def seeds(text: str) -> tuple[int, ...]:
    """Parses whole numbers, separated by commas."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,3")
    return tuple(dict.fromkeys(int(part) for part in parts))


def codec(text: str) -> str:
    """Returns the text of a codec or policy, the same for equal ones; short for one codec."""
    try:
        parsed = policy.parse(text, "the codec")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed.spec() if parsed.rules else shorten(parsed.default)


def step_codec(text: str) -> str:
    """Returns the text of a codec whose compression starts at once, unless `text` says when."""
    parsed = _parse_codec(text)
    if isinstance(parsed, PowerSGD | Auto):
        return shorten(parsed if "start=" in text else replace(parsed, start_iter=TORCH_START))
    blocks = [kind.name for kind in LOSSY if kind.block is not None]
    if parsed.name not in (*WIRE_TYPES, *blocks):
        raise argparse.ArgumentTypeError(
            f"{text} is not measured here: expected {', '.join((*WIRE_TYPES, *blocks))}, "
            "powersgd or auto"
        )
    return shorten(parsed)


def compressing_codec(text: str) -> Codec:
    parsed = _parse_codec(text)
    if not isinstance(parsed, PowerSGD | Lossy):
        known = ", ".join((PowerSGD.name, *(kind.name for kind in LOSSY)))
        raise argparse.ArgumentTypeError(f"{text} is not measured here: expected {known}")
    return parsed


def _parse_codec(text: str) -> Codec:
    try:
        return parse(text, "the codec")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shapes(text: str) -> tuple[str, list[Shape]]:
    """Parses a model's name, or shapes as in 64x3x7x7,1000x2048; returns it and the shapes."""
    if text in MODELS:
        return text, shapes_of(text)
    try:
        found = [tuple(int(extent) for extent in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        found = []
    if not found or any(extent < 1 for shape in found for extent in shape):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(MODELS)} nor shapes such as 64x3x7x7,1000x2048"
        )
    return text, found
