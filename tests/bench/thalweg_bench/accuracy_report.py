"""Reports the effect of codecs on accuracy: a table, and curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.codecs import LOSSY
from thalweg_bench import plots
from thalweg_bench.accuracy import Row
from thalweg_bench.report import make_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASE = "fp32"
# A codec may cost this many points of accuracy, by its name.
_ALLOWED = {"fp16": 0.5, "powersgd": 0.5} | {
    kind.name: 1.5 if kind.is_coarse else 0.5 for kind in LOSSY
}
_HEADINGS = (
    "model",
    "codec",
    "accuracy, % (smallest to largest)",
    "points from fp32",
    "allowed",
    "met",
    "bytes sent, of fp32's",
    "received",
    "seconds",
)


def table(rows: Sequence[Row]) -> str:
    """Returns a line per model and codec, means over seeds; differences are of equal seeds."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        base = _by_seed(rows, model, _BASE)
        for codec in dict.fromkeys(row.codec for row in rows if row.model == model):
            lines.append(_line(model, codec, _by_seed(rows, model, codec), base))
    return make_table(_HEADINGS, lines, left=2)


def _by_seed(rows: Sequence[Row], model: str, codec: str) -> dict[int, Row]:
    return {row.seed: row for row in rows if (row.model, row.codec) == (model, codec)}


def _line(model: str, codec: str, own: dict[int, Row], base: dict[int, Row]) -> tuple[str, ...]:
    percent = [100 * row.accuracy for row in own.values()]
    pairs = [(own[seed], base[seed]) for seed in own if seed in base]
    points = [100 * (row.accuracy - other.accuracy) for row, other in pairs]
    allowed = _ALLOWED.get(codec.partition(":")[0])
    return (
        model,
        f"`{codec}`",
        f"{statistics.mean(percent):.2f} ({min(percent):.2f} to {max(percent):.2f})",
        _difference(points) if codec != _BASE else "-",
        "-" if allowed is None else f"-{allowed:.1f}",
        _met(points, allowed),
        _ratio([(row.wire_bytes_sent, other.wire_bytes_sent) for row, other in pairs]),
        _ratio([(row.wire_bytes_received, other.wire_bytes_received) for row, other in pairs]),
        f"{statistics.mean(row.seconds for row in own.values()):.0f}",
    )


def _difference(points: Sequence[float]) -> str:
    """Formats the mean, with its standard error if there are several points."""
    if not points:
        return "-"
    mean = f"{statistics.mean(points):+.2f}"
    if len(points) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(points) / len(points) ** 0.5:.2f}"


def _met(points: Sequence[float], allowed: float | None) -> str:
    if not points or allowed is None:
        return "-"
    return "yes" if statistics.mean(points) >= -allowed else "**no**"


def _ratio(pairs: Sequence[tuple[int, int]]) -> str:
    if not pairs:
        return "-"
    return f"{sum(own for own, _ in pairs) / sum(base for _, base in pairs):.4f}"


def draw(folder: Path, rows: Sequence[Row]) -> None:
    """Writes FOLDER/accuracy-MODEL.png for each model. Raises ConfigError without matplotlib."""
    for model in dict.fromkeys(row.model for row in rows):
        figure = plots.new_figure()
        loss, accuracy = figure.subplots(1, 2)
        for number, codec in enumerate(dict.fromkeys(row.codec for row in rows)):
            own = list(_by_seed(rows, model, codec).values())
            if own:
                _curve(loss, own, "loss", color=f"C{number}")
                _curve(accuracy, own, "accuracy", unit=100, color=f"C{number}", label=codec)
        loss.set(xlabel="step", ylabel="training loss", yscale="log")
        worst = min(row.accuracy for row in rows if row.model == model)
        accuracy.set(xlabel="step", ylabel="test accuracy, %", ylim=(100 * worst - 10, None))
        figure.suptitle(f"Fashion-MNIST, {model}: mean over seeds, smallest to largest")
        plots.save(figure, folder / f"accuracy-{model}.png")


def _curve(
    axes: Axes, rows: Sequence[Row], key: str, *, color: str, unit: float = 1, label: str = ""
) -> None:
    """Draws the mean over rows, in a band from the smallest to the largest."""
    steps = [point["step"] for point in rows[0].curve]
    points = [
        [unit * point[key] for point in same]
        for same in zip(*(row.curve for row in rows), strict=True)
    ]
    axes.plot(steps, [statistics.mean(values) for values in points], color=color, label=label)
    low, high = [min(values) for values in points], [max(values) for values in points]
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
