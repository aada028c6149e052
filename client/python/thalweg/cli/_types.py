"""What arguments of the command line take: each function is a `type` of argparse.

They raise ArgumentTypeError, which argparse shows behind the option's name.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from thalweg import policy
from thalweg._settings._checks import MAX_TIMEOUT

_MAX_COUNT = 1024
_MAX_PORT = 65535
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MAX_RATE = 10**15  # bits per second


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns the type of whole numbers from `low` to `high`; None: of all from `low` on."""
    expected = f"{low} or more" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise _error(f"a whole number, {expected}", text)
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Returns the type of seconds from `low` to `high`; with 0, more than that."""
    expected = f"more than 0 and at most {high}" if low == 0 else f"from {low} to {high}"

    def parse(text: str) -> float:
        number = _float(text)
        if not low <= number <= high or number == 0:
            raise _error(f"seconds, {expected}", text)
        return number

    return parse


count = whole(1, _MAX_COUNT)  # of nodes, or of workers per node
shards = whole(0, _MAX_COUNT)
positive = whole(1)
natural = whole(0)
port = whole(0, _MAX_PORT)
timeout = seconds(0, MAX_TIMEOUT)


def above_zero(text: str) -> float:
    """Returns a finite number."""
    number = _float(text)
    if not 0 < number < math.inf:
        raise _error("a number, more than 0", text)
    return number


def folder(text: str) -> Path:
    if not text:
        raise _error("a folder", text)
    return Path(text)


def codec(text: str) -> str:
    """Returns the text form of a codec or policy, with every key."""
    try:
        return policy.parse(text).spec()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Returns bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text, re.ASCII)
    number = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= number <= _MAX_RATE:
        raise _error("a rate such as 940mbit or 10gbit", text)
    return number


def rate_as_text(bits_per_second: float) -> str:
    """Returns what rate() reads, to the bit."""
    return f"{bits_per_second / 1e3:.3f}kbit"


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _error(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
