"""Lets exchanges fail that pair a worker's finish() with another one's step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from thalweg.ps._plan import Plan

_MARK = "grad_squares"  # a setting that means nothing where gradients are not clipped
_MANY = 32  # exchanges that a worker may be ahead; shards keep the settings of a few more
_ALIKE = "all workers do equally many steps, and call finish() alike"


def mark_of(plan: Plan, *, ends: bool) -> dict[str, float]:
    """Returns what an exchange gives with its settings. Shards refuse nodes, and sidecars workers,
    that give others under the same number. `ends`: the exchange is of finish().
    """
    ahead = 1 + plan.delay * plan.fragments // plan.every
    return {"anew": ahead <= _MANY, _MARK: float(ends)}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Says of an error what workers do that are not in the same exchange."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if text := _explained(str(error).removeprefix("thalweg: ")):
            raise RuntimeError(f"thalweg: {text}") from error
        raise


def _explained(text: str) -> str:
    """Returns an error's text with what its cause may be; empty: it says that itself."""
    if _ALIKE in text:
        return ""
    if _MARK in text or "number of settings" in text or "submitted it with settings" in text:
        return (
            f"some workers are in finish(), others in a step that exchanges: {_ALIKE} ({text}; "
            f"{_MARK} is 1 in finish())"
        )
    if "left while round" in text or "has left the job" in text:
        return f"{text}: {_ALIKE}"
    return ""
