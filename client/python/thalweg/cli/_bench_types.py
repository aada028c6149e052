"""What arguments of `thalweg bench` may be."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

from thalweg.lab import parse_rate


def number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def size(text: str) -> int:
    value = int(text)
    if value < 4 or value % 4 or value > 4 << 30:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4 from 4 to {4 << 30}")
    return value


def output(text: str) -> Path:
    """A file to write."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def folder(text: str) -> Path:
    """One that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    return path


def rate(text: str) -> int | None:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of the known ones, with commas."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name for name in text.split(",") if name))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known are {', '.join(known)}"
            )
        return chosen

    return parse
