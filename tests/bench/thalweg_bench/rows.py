"""Defines a benchmark's results, and the bounds that they are compared with."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


def exchange_bound(
    wire_bytes: int,
    rate: float | None,
    nodes: int,
    shards: int,
    *,
    slow_factor: int = 1,
) -> float | None:
    """Returns Thalweg's bound: each node sends and receives its gradients once, at the same time.

    A shard's link carries nodes/shards times as much as a node's. One shard's link may be slower by
    `slow_factor`; every other shard then sums more than the slow one by that factor.
    """
    if rate is None or shards == 0:
        return None
    parts = slow_factor * (shards - 1) + 1
    return wire_bytes * 8 / rate * max(1.0, nodes * slow_factor / parts)


def hosted_bound(
    wire_bytes: float, rate: float | None, nodes: int, shards: int, *, slow_node: int = 1
) -> float | None:
    """Returns the bound where every node hosts a shard too, and all share the sums as well as can
    be.

    A node that sums x bytes carries wire_bytes + (nodes - 2)·x in each direction, another shard
    nodes·x. The last node's link may be slower by `slow_node`.
    """
    if rate is None or nodes < 2:
        return None
    node_rates = [rate / 8] * (nodes - 1) + [rate / 8 / slow_node]

    def summed_within(seconds: float) -> float:
        spare = [seconds * r - wire_bytes for r in node_rates]
        if min(spare) < 0:
            return -1.0
        hosted = sum(min(wire_bytes, s / (nodes - 2)) if nodes > 2 else wire_bytes for s in spare)
        return hosted + shards * seconds * rate / 8 / nodes

    low, high = 0.0, 2 * nodes * wire_bytes / min(node_rates)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if summed_within(middle) >= wire_bytes else (middle, high)
    return high


def ring_bound(size: int, rate: float | None, ranks: int, nodes: int) -> float | None:
    """Returns the bound of a ring allreduce: every rank sends 2·(N-1)/N of the bytes to its
    successor.

    Ranks of a node are neighbours in the ring, so that it leaves each node once and enters it once,
    however many workers the node has: a link carries what one rank sends.
    """
    if rate is None or nodes < 2:
        return None
    return 2 * (ranks - 1) / ranks * size * 8 / rate


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def make_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns one line per row, in the order of HEADINGS."""
    ours = {(row.case, row.bytes): row.median_s for row in rows if row.system == "thalweg"}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        own = ours.get((row.case, row.bytes))
        lines.append(
            (
                row.case,
                row.system,
                f"{row.bytes / 1e6:.3f}",
                f"{row.median_s * 1e3:.3f}",
                f"{row.min_s * 1e3:.3f}",
                f"{row.max_s * 1e3:.3f}",
                "-" if row.bound_s is None else f"{row.bound_s / row.median_s:.3f}",
                "-" if own is None or row.system == "thalweg" else f"{row.median_s / own:.2f}x",
            )
        )
    return lines


def format_table(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, *make_cells(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
