"""Writes the page and the plots of what a suite has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg_bench import plots
from thalweg_bench.results import NODES, Results, targets
from thalweg_bench.rows import Row, markdown, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def write(
    folder: Path, found: Results, machine: Mapping[str, object], names: Sequence[str]
) -> None:
    """Writes FOLDER/performance.md, of FOLDER/NAME.md, and plots. Raises ConfigError without
    matplotlib.
    """
    about = "\n".join(f"- {key}: {value}" for key, value in machine.items() if value)
    reached_ = markdown(("case", "target", "measured", "met"), reached(found), left=4)
    parts = ["# Performance: measurements", about, "## Targets", reached_]
    for draw in (allreduce, step, sweep, scale):
        figure, name = plots.new_figure(), f"performance/{draw.__name__}.png"
        try:
            draw(figure.add_subplot(), found)
        except LookupError as error:
            say(f"no {draw.__name__}.png: not measured: {error}")
        else:
            plots.save(figure, folder / name)
            parts.append(f"![{draw.__name__}]({name})")
    paths = [path for name in names if (path := folder / f"{name}.md").exists()]
    parts += [path.read_text(encoding="utf-8").rstrip() for path in paths]
    (folder / "performance.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def reached(found: Results) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for case, target, measure in targets():
        try:
            text, met = measure(found)
            shown = {True: "yes", False: "**no**", None: "-"}[met]
        except LookupError:
            text, shown = "not measured", "-"
        lines.append((case, target, text, shown))
    return lines


def sweep(axes: Axes, found: Results) -> None:
    rows = found.rows["sweep-1gbit"]
    systems = ("thalweg", "gloo")
    plots.curves(axes, {s: {row.bytes: row for row in rows if row.system == s} for s in systems})
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    axes.set_title("Allreduce, fp32, 4 nodes + 4 shards, 1 Gbit/s")


def scale(axes: Axes, found: Results) -> None:
    plots.curves(axes, {"thalweg": {n: found.row(f"scale-{n}", "thalweg") for n in NODES}})
    axes.set(xscale="log", xlabel="nodes = shards", ylabel="seconds")
    axes.set_xticks(NODES, [str(nodes) for nodes in NODES], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_title("Allreduce of 12 MB, fp32, 50 Mbit/s")


def allreduce(axes: Axes, found: Results) -> None:
    """Draws time in units of what the bytes need once over a link."""

    def of_case(name: str) -> list[tuple[Row, float]]:
        once = found.row(name, "iperf3").median_s
        return [(found.row(name, system), once) for system in ("thalweg", "gloo")]

    plots.bars(axes, {label: of_case(name) for name, label in _ALLREDUCES.items()})
    axes.set(ylabel="time / (size/rate)", title="Allreduce of 102 MB, fp32")


def step(axes: Axes, found: Results) -> None:
    def communication(rows: Sequence[Row]) -> list[tuple[Row, float]]:
        apart = [row for row in rows if row.case.endswith(" communication")]
        return [(row, 1.0) for row in apart if row.system != "iperf3"]

    plots.bars(axes, {label: communication(found.rows[name]) for name, label in _STEPS.items()})
    axes.set(ylabel="seconds", title="Communication of a DDP step, 4 nodes + 4 shards, 250 Mbit/s")
