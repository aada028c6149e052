"""Names of parameters in messages."""

from __future__ import annotations


def some(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
