#!/usr/bin/env python3
"""Draws the tables of docs/measurements/placement.md#every-rate beside it: plot_placement.py

Each has a row for a number of nodes and a column for a number of aggregators; a cell says how many
times as fast as Gloo they were, and which part of the bound that is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "placement.md"
PICTURE = PAGE.parent / "performance" / "placement-rates.png"
Table = dict[int, list[float]]  # times Gloo's speed, by nodes; with 0, 1, … aggregators


def tables() -> Iterator[tuple[str, Table]]:
    """Yields each rate with its table."""
    text = PAGE.read_text(encoding="utf-8").partition("## Every rate")[2]
    for rate, rows in re.findall(
        r"^\| nodes, (\S+ .bit/s) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M
    ):
        found: Table = {}
        for row in rows.splitlines():
            nodes, *cells = row.strip("| ").split(" | ")
            found[int(nodes)] = [float(c.split()[0]) for c in cells if c.strip("| ")]
        yield rate, found


def main() -> None:
    found = list(tables())
    figure, axes = pyplot.subplots(1, len(found), figsize=(3 * len(found), 3.2), sharey=True)
    for each, (rate, table) in zip(axes, found, strict=True):
        for nodes, ratios in table.items():
            each.plot(range(len(ratios)), ratios, marker="o", markersize=3, label=f"{nodes} nodes")
        each.axhline(1, color="gray", linewidth=0.8)
        each.set_title(rate)
        each.set_xlabel("aggregators")
    axes[0].set_ylabel("times Gloo's speed")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
