"""Draws measurements, each with its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg_bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    "thalweg": "Thalweg",
    "gloo": "Gloo",
    "ddp": "DDP over Gloo",
    "torch-fp16": "torch's fp16 hook over Gloo",
}
_COLOURS = dict(zip(_NAMES, ("tab:blue", "tab:orange", "tab:orange", "tab:red"), strict=True))


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


def curves(axes: Axes, by_system: Mapping[str, Mapping[int, Row]]) -> None:
    """Draws medians over what the rows are given by, with their spread, and the bounds."""
    for system, rows in by_system.items():
        colour, name, x = _COLOURS[system], _NAMES[system], list(rows)
        medians = [row.median_s for row in rows.values()]
        spread = [
            [row.median_s - row.min_s for row in rows.values()],
            [row.max_s - row.median_s for row in rows.values()],
        ]
        axes.errorbar(x, medians, yerr=spread, marker="o", capsize=3, color=colour, label=name)
        bounds = [row.bound_s or float("nan") for row in rows.values()]
        axes.plot(x, bounds, "--", color=colour, label=f"{name}'s bound")


def bars(axes: Axes, groups: Mapping[str, Sequence[tuple[Row, float]]]) -> None:
    """Draws a group of bars for each key; values are divided by the number beside each row."""
    width, labelled = 0.28, set[str]()

    def label(name: str) -> str:
        new = name not in labelled
        labelled.add(name)
        return name if new else ""

    for index, group in enumerate(groups.values()):
        for position, (row, unit) in enumerate(group):
            x = index + (position - (len(group) - 1) / 2) * width
            colour, name = _COLOURS[row.system], label(_NAMES[row.system])
            axes.bar(x, row.median_s / unit, width * 0.9, color=colour, label=name)
            if row.bound_s:
                ends = (x - width / 2, x + width / 2)
                axes.hlines(row.bound_s / unit, *ends, color="black", label=label("bound"))
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
