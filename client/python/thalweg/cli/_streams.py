"""Keeps the standard streams usable when they are closed, full, or have no reader any more."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO


def open_closed() -> None:
    """Opens those that were closed when the program started (`>&-`), so that nothing else gets
    their numbers; what is written to them is lost.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free, which is the stream's.
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    # As standard error, standard output takes what its encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Lets what the stream holds, and all that follows, be lost: writing to it would fail."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, stream.fileno())
    os.close(null)
