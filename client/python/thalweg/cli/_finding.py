"""What `thalweg doctor --cluster` has found."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """`note`: could not be looked at, which need not be wrong. Only FAIL makes the exit code 1."""

    level: Literal["ok", "note", "warn", "FAIL"]
    text: str
