"""Draws trainings side by side: one picture per model and tag, with a curve per suffix.

    python -m thalweg.examples.swin.plot --output output

Beside each picture it writes the same as Markdown and JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.examples.swin import SwinError
from thalweg.examples.swin.logger import FILE
from thalweg.examples.swin.parser import Log, Summary, parse_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST_NODE = "0"
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_BARS = (
    ("step_seconds", "s per step"),
    ("images_per_second", "images per s"),
    ("memory_mb", "MB of memory, one worker"),
    ("sent_mb", "MB sent per step"),
)
Runs = Mapping[str, Mapping[str, Log]]  # suffix, output suffix


def traverse(output: str | Path = "output") -> dict[str, dict[str, dict[str, Log]]]:
    """Returns the logs below OUTPUT/MODEL_TAG/SUFFIX/OUTPUT_SUFFIX/0/log by those three names.

    Raises SwinError if the folder is missing or empty, or if a run has no log of its node 0.
    """
    root = Path(output)
    if not root.is_dir():
        raise SwinError(f"there is no folder {root}: run a training first, or give --output")
    found: dict[str, dict[str, dict[str, Log]]] = {}
    for run in sorted(root.glob("*/*/*")):
        if not run.is_dir():
            continue
        nodes = sorted(node.name for node in run.iterdir() if (node / FILE).is_file())
        if _FIRST_NODE not in nodes:
            there = f"only of {', '.join(nodes)}" if nodes else "of no node"
            raise SwinError(
                f"{run} has no log of node {_FIRST_NODE}, {there}: expected "
                f"{run / _FIRST_NODE / FILE}; copy it from the first host, or remove the folder"
            )
        model_tag, suffix, output_suffix = run.parts[-3:]
        log = parse_file(run / _FIRST_NODE / FILE)
        found.setdefault(model_tag, {}).setdefault(suffix, {})[output_suffix] = log
    if not found:
        raise SwinError(f"{root} has no runs: expected MODEL_TAG/SUFFIX/OUTPUT_SUFFIX/NODE/{FILE}")
    return found


def plot(model_tag: str, runs: Runs, folder: str | Path) -> Path:
    """Draws the runs of a model and tag; returns the path of the picture in `folder`.

    Writes MODEL_TAG.png, .md and .json there.
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, 3)
    figure.suptitle(model_tag)
    colors = {suffix: _COLORS[i % len(_COLORS)] for i, suffix in enumerate(runs)}
    _draw_curves(axes[0, 0], axes[0, 1], runs, colors)
    summaries = {suffix: _middle(logs) for suffix, logs in runs.items()}
    for ax, (name, label) in zip([axes[0, 2], *axes[1]], _BARS, strict=True):
        values = [getattr(summary, name) for summary in summaries.values()]
        bars = ax.bar(range(len(values)), values, color=list(colors.values()))
        ax.bar_label(bars, fmt="%.3g")
        ax.set_xticks(range(len(values)), list(summaries), rotation=15, fontsize=8)
        ax.set_title(label, fontsize=10)
        ax.margins(y=0.15)
    path = folder / f"{model_tag}.png"
    figure.savefig(path, dpi=75)
    path.with_suffix(".md").write_text(table(summaries) + "\n", encoding="utf-8")
    rows = {
        suffix: {name: log.summary().as_dict() for name, log in logs.items()}
        for suffix, logs in runs.items()
    }
    path.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return path


def table(summaries: Mapping[str, Summary]) -> str:
    """Returns a Markdown table that compares each suffix with the first one."""
    lines = [
        "| run | workers | step, s | faster | images/s | MB sent per step | memory, MB | loss "
        "| top-1, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = next(iter(summaries.values()))
    for suffix, s in summaries.items():
        top1 = "" if s.top1 is None else f"{s.top1:.1f}"
        lines.append(
            f"| {suffix} | {s.workers} | {s.step_seconds:.3f} "
            f"| {first.step_seconds / s.step_seconds:.2f}x | {s.images_per_second:.1f} "
            f"| {s.sent_mb:.2f} | {s.memory_mb:.0f} | {s.loss:.3f} | {top1} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plot", description="Draws trainings side by side.")
    parser.add_argument("--output", type=Path, default=Path("output"), help="of the trainings")
    parser.add_argument("--pictures", type=Path, help="default: the folder of --output")
    args = parser.parse_args(argv)
    try:
        for model_tag, runs in traverse(args.output).items():
            path = plot(model_tag, runs, args.pictures or args.output)
            print(f"{path}\n{path.with_suffix('.md').read_text(encoding='utf-8')}")
    except SwinError as error:
        print(f"swin: {error}", file=sys.stderr)
        return 2
    return 0


def _draw_curves(loss: Axes, accuracy: Axes, runs: Runs, colors: Mapping[str, str]) -> None:
    for suffix, logs in runs.items():
        for number, log in enumerate(logs.values()):
            label = suffix if number == 0 else None
            loss.plot(
                log.column("step"), log.column("loss"), color=colors[suffix], label=label, lw=1
            )
            steps = [entry["step"] for entry in log.validation]
            top1 = [entry["top1"] for entry in log.validation]
            accuracy.plot(steps, top1, color=colors[suffix], marker="o", ms=3, label=label, lw=1)
    for ax, title in ((loss, "training loss"), (accuracy, "top-1, %")):
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.legend(fontsize=8)


def _middle(logs: Mapping[str, Log]) -> Summary:
    """Returns the summary of the run with the median step."""
    ordered = sorted((log.summary() for log in logs.values()), key=lambda s: s.step_seconds)
    return ordered[len(ordered) // 2]


if __name__ == "__main__":
    sys.exit(main())
