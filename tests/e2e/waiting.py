"""Waits for what other programs do and nobody announces, and lets time pass where it must."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    what: str,
    ask: Callable[[], T],
    seconds: float,
    why: Callable[[], str] = str,
    *,
    every: float = 0.2,
) -> T:
    """Asks until the answer is true, and returns it. Raises AssertionError at the deadline, with
    `what` and the text of `why`.
    """
    answer = settled(ask, bool, seconds, every=every)
    assert answer, f"not in {seconds:g} s: {what}\n{why()}"
    return answer


def settled(
    ask: Callable[[], T], is_good: Callable[[T], bool], seconds: float, *, every: float = 0.2
) -> T:
    """Asks until the answer is good, and returns it; at the deadline returns the last answer."""
    deadline = time.monotonic() + seconds
    while not is_good(answer := ask()) and time.monotonic() < deadline:
        time.sleep(every)
    return answer


def pass_time(seconds: float) -> None:
    """Lets time pass that is a part of the test itself: of a device that computes, a link that is
    cut, a worker that is late. It is no way to wait for what others do, which until() is.
    """
    time.sleep(seconds)
