"""Waits for what other programs do and nobody announces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_POLL_SECONDS = 0.2
T = TypeVar("T")


def until(what: str, ask: Callable[[], T], seconds: float, why: Callable[[], str] = str) -> T:
    """Asks until the answer is true, and returns it. Raises AssertionError at the deadline, with
    `what` and the text of `why`.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}\n{why()}"
        pause.wait(_POLL_SECONDS)
    return answer
