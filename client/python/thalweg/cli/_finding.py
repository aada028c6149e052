"""Defines the findings of `thalweg doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One finding. A `note` says that something could not be checked and may still be right. Only
    FAIL makes the exit code 1.
    """

    level: Literal["ok", "note", "warn", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5} {self.text}"
