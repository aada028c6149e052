"""`thalweg bench placement` measures clusters whose sidecars host shards, beside more and more
aggregators, at several rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thalweg_bench import lab_case, plots
from thalweg_bench.cluster import Shape
from thalweg_bench.lab import format_rate
from thalweg_bench.lab_case import LabCase
from thalweg_bench.rows import Row, say, write_json


@dataclass(frozen=True)
class Sweep:
    """Clusters of each number of nodes with each number of aggregators up to that, at each rate."""

    case: LabCase  # what they do
    nodes: Sequence[int]
    shards: Sequence[int]
    rates: Sequence[int | None]

    def shapes(self) -> Iterator[Shape]:
        for rate in self.rates:
            for nodes in self.nodes:
                for shards in self.shards:
                    if shards <= nodes:
                        yield self.shape(nodes, shards, rate)

    def shape(self, nodes: int, shards: int, rate: int | None) -> Shape:
        return replace(self.case.shape, nodes=nodes, shards=shards, rate=rate, local=True)


@dataclass(frozen=True)
class Point:
    """One cluster beside Gloo's ring on the same links."""

    speed: float  # Gloo's time / ours
    limit: float  # the same of the bounds
    of_bound: float  # our bound / our time


def run(sweep: Sweep, save: Path | None = None) -> list[Row]:
    """Runs the case in all shapes, each in a cluster of its own; writes the rows to `save`, if any,
    after each.

    Raises BenchError, LabError or ServerError.
    """
    found: list[Row] = []
    for shape in sweep.shapes():
        rate = format_rate(shape.rate)
        say(f"{shape.nodes} nodes + {shape.shards} aggregators at {rate}")
        found += lab_case.run(replace(sweep.case, shape=shape)).rows
        if save is not None:
            write_json(save, found)
    return found


def point(rows: Sequence[Row], case: str) -> Point | None:
    """Returns what the rows say of a case; None: they lack one of its systems or a bound."""
    found = {row.system: row for row in rows if row.case == case}
    ours, gloo = found.get("thalweg"), found.get("gloo")
    if ours is None or gloo is None or not ours.bound_s or not gloo.bound_s:
        return None
    return Point(
        gloo.median_s / ours.median_s, gloo.bound_s / ours.bound_s, ours.bound_s / ours.median_s
    )


def format_grid(rows: Sequence[Row], sweep: Sweep) -> str:
    """Returns a table for each rate, in Markdown: speed beside Gloo and, in parentheses, part of
    the bound, by nodes and aggregators.
    """
    lines: list[str] = []
    for rate in sweep.rates:
        lines += [
            f"{format_rate(rate)}: times as fast as Gloo (part of the bound)",
            "",
            "| nodes | " + " | ".join(f"+ {shards}" for shards in sweep.shards) + " |",
            "|---" * (len(sweep.shards) + 1) + "|",
        ]
        for nodes in sweep.nodes:
            cells = []
            for shards in sweep.shards:
                name = replace(sweep.case, shape=sweep.shape(nodes, shards, rate)).name
                found = point(rows, name)
                cells.append(f"{found.speed:.2f} ({found.of_bound:.2f})" if found else "")
            lines.append(f"| {nodes} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Row], sweep: Sweep) -> None:
    """Draws the speed relative to Gloo over the number of aggregators, and its bound.

    Raises ConfigError without matplotlib.
    """
    figure = plots.new_figure()
    figure.set_size_inches(4 + 4 * len(sweep.rates), 4)
    grid = figure.subplots(1, len(sweep.rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(grid, sweep.rates, strict=True):
        for nodes in sweep.nodes:
            drawn: list[tuple[int, float, float]] = []
            for shards in sweep.shards:
                name = replace(sweep.case, shape=sweep.shape(nodes, shards, rate)).name
                if found := point(rows, name):
                    drawn.append((shards, found.speed, found.limit))
            if drawn:
                counts, speeds, limits = zip(*drawn, strict=True)
                label = f"{nodes} nodes" if axes is grid[0] else None
                (line,) = axes.plot(counts, speeds, "o-", label=label)
                axes.plot(counts, limits, ":", color=line.get_color())
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_title(format_rate(rate))
        axes.set_xlabel("aggregators beside the nodes' own shards")
    grid[0].set_ylabel("times as fast as Gloo (dotted: bound)")
    plots.save(figure, path)
