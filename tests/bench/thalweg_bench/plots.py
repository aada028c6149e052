"""Plots a suite's measurements, each with its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg._settings._config import ConfigError
from thalweg_bench.results import Results
from thalweg_bench.rows import Row, say
from thalweg_bench.suite_cases import SCALE_NODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    "thalweg": "Thalweg",
    "gloo": "Gloo",
    "ddp": "DDP over Gloo",
    "torch-fp16": "torch's fp16 hook over Gloo",
}
_COLOURS = {
    "thalweg": "tab:blue",
    "gloo": "tab:orange",
    "ddp": "tab:orange",
    "torch-fp16": "tab:red",
}
_ALLREDUCES = {
    "allreduce-4x250mbit": "4 nodes\n250 Mbit/s",
    "allreduce-4x500mbit": "4 nodes\n500 Mbit/s",
    "allreduce-4x1gbit": "4 nodes\n1 Gbit/s",
    "allreduce-4x2gbit": "4 nodes\n2 Gbit/s",
    "allreduce-4x2workers-250mbit": "4 nodes x 2\n250 Mbit/s",
    "allreduce-8x100mbit": "8 nodes\n100 Mbit/s",
}
_STEPS = {
    "step-resnet50": "ResNet-50\nfp16",
    "step-swin-t": "Swin-T\nfp16",
    "step-bert-base": "BERT-base\nfp16",
    "step-4x2workers-fp32": "ResNet-50\nfp32, 2 workers",
}


def write(folder: Path, results: Results) -> None:
    """Writes a PNG file per plot with measured cases. Raises ConfigError without matplotlib."""
    for name, draw in PLOTS.items():
        figure = new_figure()
        if draw(figure.add_subplot(), results):
            save(figure, folder / f"{name}.png")
        else:
            say(f"no {name}.png: its cases are not measured")


def new_figure() -> Figure:
    """Returns a new figure. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: install it, or leave --plots out") from None
    figure = Figure(figsize=(8, 4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Saves a PNG file with a legend below; equal measurements give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Software": None})  # omits the version


def sweep(axes: Axes, results: Results) -> bool:
    """Draws time over size."""
    rows = results.rows.get("sweep-1gbit", ())
    for system in ("thalweg", "gloo"):
        own = [row for row in rows if row.system == system]
        _curve(axes, [row.bytes for row in own], own, system)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    axes.set_title("Allreduce, fp32, 4 nodes + 4 shards, 1 Gbit/s")
    return bool(rows)


def scale(axes: Axes, results: Results) -> bool:
    """Draws time over nodes."""
    own = [row for row in results.rows.get("scale", ()) if row.system == "thalweg"]
    if len(own) != len(SCALE_NODES):
        return False
    _curve(axes, SCALE_NODES, own, "thalweg")
    axes.set(xscale="log", xlabel="nodes = shards", ylabel="seconds")
    axes.set_xticks(SCALE_NODES, [str(nodes) for nodes in SCALE_NODES], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_title("Allreduce of 12 MB, fp32, 50 Mbit/s")
    return True


def allreduce(axes: Axes, results: Results) -> bool:
    """Draws time in units of what the bytes need once over a link."""
    groups = {}
    for name, label in _ALLREDUCES.items():
        once = results.find(name, "iperf3")
        rows = [results.find(name, system) for system in ("thalweg", "gloo")]
        if once is not None:
            groups[label] = [(row, once.median_s) for row in rows if row is not None]
    _bars(axes, groups)
    axes.set(ylabel="time / (size/rate)", title="Allreduce of 102 MB, fp32")
    return bool(groups)


def step(axes: Axes, results: Results) -> bool:
    """Draws the seconds of communication."""
    groups = {}
    for name, label in _STEPS.items():
        rows = [
            results.find(name, system, " communication")
            for system in ("thalweg", "torch-fp16", "ddp")
        ]
        if name in results.rows:
            groups[label] = [(row, 1.0) for row in rows if row is not None]
    _bars(axes, groups)
    axes.set(ylabel="seconds", title="Communication of a DDP step, 4 nodes + 4 shards, 250 Mbit/s")
    return bool(groups)


PLOTS: dict[str, Callable[[Any, Results], bool]] = {
    "sweep": sweep,
    "allreduce": allreduce,
    "scale": scale,
    "step": step,
}


def _curve(axes: Axes, x: Sequence[int], rows: Sequence[Row], system: str) -> None:
    """Draws medians with their spread, and the bound."""
    colour = _COLOURS[system]
    medians = [row.median_s for row in rows]
    spread = [
        [row.median_s - row.min_s for row in rows],
        [row.max_s - row.median_s for row in rows],
    ]
    axes.errorbar(
        x, medians, yerr=spread, marker="o", capsize=3, color=colour, label=_NAMES[system]
    )
    bounds = [row.bound_s or float("nan") for row in rows]
    axes.plot(x, bounds, "--", color=colour, label=f"{_NAMES[system]}'s bound")


def _bars(axes: Axes, groups: dict[str, list[tuple[Row, float]]]) -> None:
    """Draws a group of bars for each key; values are divided by the number beside each row."""
    width = 0.28
    labelled: set[str] = set()
    for index, bars in enumerate(groups.values()):
        for position, (row, unit) in enumerate(bars):
            x = index + (position - (len(bars) - 1) / 2) * width
            label = "" if row.system in labelled else _NAMES[row.system]
            labelled.add(row.system)
            axes.bar(x, row.median_s / unit, width * 0.9, color=_COLOURS[row.system], label=label)
            if row.bound_s:
                label = "" if "bound" in labelled else "bound"
                labelled.add("bound")
                axes.hlines(
                    row.bound_s / unit, x - width / 2, x + width / 2, color="black", label=label
                )
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
