"""Keeps how long things took on the cluster; `make test-kube` ends with the list."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

lines: list[str] = []


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    note(what, time.monotonic() - started)


def note(what: str, seconds: float) -> None:
    lines.append(f"{seconds:7.1f} s  {what}")
