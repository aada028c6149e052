"""`thalweg bench placement` measures clusters whose sidecars host shards, beside more and more
aggregators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from thalweg_bench import lab_case, plots
from thalweg_bench.cluster import Shape
from thalweg_bench.lab_case import LabCase
from thalweg_bench.rows import Row, say


def shapes(first: Shape, nodes: Sequence[int], shards: Sequence[int]) -> Iterator[Shape]:
    """Yields `first` with each number of nodes and, up to that, each number of aggregators."""
    for node_count in nodes:
        for shard_count in shards:
            if shard_count <= node_count:
                yield replace(first, nodes=node_count, shards=shard_count, local=True)


def run(case: LabCase, nodes: Sequence[int], shards: Sequence[int]) -> list[Row]:
    """Runs `case` in all shapes, each in a cluster of its own.

    Raises BenchError, LabError or ServerError.
    """
    rows: list[Row] = []
    for shape in shapes(case.shape, nodes, shards):
        say(f"{shape.nodes} nodes + {shape.shards} aggregators")
        rows += lab_case.run(replace(case, shape=shape)).rows
    return rows


def plot(path: Path, rows: Sequence[Row], case: LabCase, nodes: Sequence[int]) -> None:
    """Draws the speed relative to Gloo over the number of aggregators, and its bound.

    Raises ConfigError without matplotlib.
    """
    medians = {(row.case, row.system): row.median_s for row in rows}
    bounds = {(row.case, row.system): row.bound_s for row in rows}
    figure = plots.new_figure()
    axes = figure.add_subplot()
    for node_count in nodes:
        drawn: list[tuple[int, float, float]] = []
        for shape in shapes(case.shape, [node_count], range(node_count + 1)):
            name = replace(case, shape=shape).name
            ours, gloo = medians.get((name, "thalweg")), medians.get((name, "gloo"))
            our_bound, ring = bounds.get((name, "thalweg")), bounds.get((name, "gloo"))
            if ours and gloo and our_bound and ring:
                drawn.append((shape.shards, gloo / ours, ring / our_bound))
        if drawn:
            counts, speeds, limits = zip(*drawn, strict=True)
            (line,) = axes.plot(counts, speeds, "o-", label=f"{node_count} nodes")
            axes.plot(counts, limits, ":", color=line.get_color())
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("aggregators beside the nodes' own shards")
    axes.set_ylabel("speed relative to Gloo (dotted: the bound)")
    plots.save(figure, path)
