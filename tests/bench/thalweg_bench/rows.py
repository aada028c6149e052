"""Defines a benchmark's results, and how they are shown and written."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADINGS = ("case", "system", "MB", "median ms", "min", "max", "of bound", "vs thalweg")


@dataclass(frozen=True)
class Row:
    """One system in one case. The JSON has exactly these keys."""

    case: str
    system: str
    bytes: int
    median_s: float
    min_s: float
    max_s: float
    bound_s: float | None  # least time over any network; None: no bound


class BenchError(RuntimeError):
    """A measurement failed, or its result is wrong."""


def make_row(
    case: str, system: str, size: int, seconds: Sequence[float], bound: float | None
) -> Row:
    return Row(case, system, size, statistics.median(seconds), min(seconds), max(seconds), bound)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def write_json(path: Path, document: object) -> None:
    """Writes at once: what an interrupted run has measured before is not lost."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def make_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns one line per row, in the order of HEADINGS."""
    ours = {(row.case, row.bytes): row.median_s for row in rows if row.system == "thalweg"}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        own = ours.get((row.case, row.bytes))
        times = (f"{seconds * 1e3:.3f}" for seconds in (row.median_s, row.min_s, row.max_s))
        of_bound = "-" if row.bound_s is None else f"{row.bound_s / row.median_s:.3f}"
        beside = "-" if own is None or row.system == "thalweg" else f"{row.median_s / own:.2f}x"
        lines.append((row.case, row.system, f"{row.bytes / 1e6:.3f}", *times, of_bound, beside))
    return lines


def format_table(rows: Sequence[Row]) -> str:
    return markdown(HEADINGS, make_cells(rows))


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int = 2) -> str:
    """Returns a table in Markdown that can be read as it is; the first `left` columns are words."""
    widths = [max(3, *map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = ["-" * w if at < left else "-" * (w - 1) + ":" for at, w in enumerate(widths)]
    aligned = [
        [cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(zipped)]
        for zipped in (zip(line, widths, strict=True) for line in (heads, *lines))
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
