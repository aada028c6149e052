"""The parameters of codecs: what they accept, and how their text form is read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A parameter of a codec in its text form."""

    name: str
    expected: str
    accepts: Callable[[Any], bool]
    read: Callable[[str], Any]  # raises ValueError when the text is no such value
    write: Callable[[Any], str] = str


def integer(name: str, low: int, high: int) -> Key:
    """Returns the key of a whole number."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise ValueError
        return int(text)

    def accepts(value: object) -> bool:
        return type(value) is int and low <= value <= high

    return Key(name, f"a whole number from {low} to {high}", accepts, read)


def real(name: str, expected: str, inside: Callable[[float], bool]) -> Key:
    """Returns the key of a number that `inside` accepts, which `expected` describes."""

    def accepts(value: object) -> bool:
        return isinstance(value, int | float) and type(value) is not bool and inside(value)

    return Key(name, expected, accepts, float, _write_real)


def _write_real(value: float) -> str:
    """Formats as C's %g where that reproduces the value, so that both languages agree."""
    short = f"{value + 0.0:g}"  # removes the sign of -0.0
    return short if float(short) == value else repr(float(value))


def flag(name: str) -> Key:
    """Returns the key of a bool, which is 1 or 0 in text."""

    def accepts(value: object) -> bool:
        return type(value) is bool

    read = {"0": False, "1": True}.get
    return Key(name, "True or False (in text 1 or 0)", accepts, read, lambda value: f"{value:d}")
