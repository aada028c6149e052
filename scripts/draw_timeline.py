#!/usr/bin/env python3
"""Draws some milliseconds of a merged trace: draw_timeline.py MERGED.json OUT.png.

One band for each process, a row for each span that overlaps others, colours by phase. Shows one
round of all buckets, the last but one unless told otherwise; or several, such as that of a push and
that of the pull after it. What a script has marked "forward" and "backward" by
torch.profiler.record_function has a band above its worker's. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from thalweg.timeline import spans
from thalweg.timeline.spans import Span, Timeline

# The phases are in the order in which a bucket passes them; None is not drawn, as others cover the
# same time.
COLOURS = {
    "copy_in": "#4878d0",
    "wait": "#d5dbe6",
    "copy_out": "#6acc64",
    "wait_workers": "#f0e3c4",
    "wait_copy": None,
    "exchange": None,
    "compress": "#956cb4",
    "reduce": "#ee854a",
    "send": "#d65f5f",
    "wire": "#e4e4e4",
    "decode": "#82c6e2",
    "return": "#55a868",
    "wait_for_slowest": "#f3d9d9",
    "fold": "#8c613c",
    "update": "#c44e52",
    "deliver": "#dc7ec0",
    "forward": "#b5d8a6",
    "backward": "#f3c78f",
}
MARKS = ("forward", "backward")
ROW, GAP = 1.0, 0.9


def window(timeline: Timeline, numbers: list[int]) -> tuple[float, float]:
    """Returns when the workers' rounds begin and end."""
    workers = [span for span in timeline.spans if span.side == "worker"]
    rounds = sorted({span.args["round"] for span in workers})
    wanted = numbers or [rounds[max(0, len(rounds) - 2)]]
    # When the framework has rebuilt its buckets, rounds count from 1 again: the last layout is
    # used.
    layout = max(span.args["layout"] for span in workers)
    some = [s for s in workers if s.args["round"] in wanted and s.args["layout"] == layout]
    if not some:
        raise SystemExit(f"no round of {wanted}: there are {rounds[0]} to {rounds[-1]}")
    return min(span.begin for span in some), max(span.end for span in some)


def marked(merged: Path) -> list[Span]:
    """Returns what scripts have marked as one of MARKS, in the process of torch's profile."""
    events = json.loads(merged.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Span("torch", event["name"], event["ts"], event["ts"] + event["dur"], event["pid"], {})
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in MARKS
    ]


def lanes(some: list[Span]) -> list[list[Span]]:
    """Returns rows in which no spans overlap."""
    rows: list[list[Span]] = []
    for span in sorted(some, key=lambda span: span.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def draw(timeline: Timeline, marks: list[Span], numbers: list[int], sides: list[str]) -> plt.Figure:
    begin, end = window(timeline, numbers)
    known = [*(span for span in timeline.spans if span.side in sides), *marks]
    drawn = [s for s in known if COLOURS.get(s.phase) and s.end > begin and s.begin < end]
    figure, axes = plt.subplots(figsize=(13, 8), layout="constrained")
    y = 0.0
    ticks = []
    # A worker's marks are in a process of torch, which is named after the worker.
    processes = {span.process for span in drawn}
    for process in sorted(processes, key=lambda p: (_owner(timeline, p), -p)):
        top = y
        for row in lanes([span for span in drawn if span.process == process]):
            times = [((s.begin - begin) / 1e3, max(s.end - s.begin, 1) / 1e3) for s in row]
            colours = [COLOURS[span.phase] for span in row]
            axes.broken_barh(times, (y, ROW * 0.86), facecolors=colours, linewidth=0)
            y += ROW
        if y > top:
            ticks.append(((top + y) / 2, timeline.names[process].partition(" (")[0]))
            y += GAP
    axes.set(xlim=(0, (end - begin) / 1e3), ylim=(y - GAP, 0), xlabel="ms")
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.phase for span in drawn}
    handles = [Patch(color=c, label=p) for p, c in COLOURS.items() if c and p in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    return figure


def _owner(timeline: Timeline, process: int) -> int:
    """Returns the process itself, or the worker whose marks it has."""
    name = timeline.names[process].partition(": torch")[0]
    return next((p for p in timeline.clocks if timeline.names[p] == name), process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("merged", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--round", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--sides", nargs="+", choices=spans.SIDES, default=spans.SIDES)
    args = parser.parse_args()
    figure = draw(spans.read(args.merged), marked(args.merged), args.round, args.sides)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
