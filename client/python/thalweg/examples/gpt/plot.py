"""Draws what thalweg.examples.gpt_local has written, by steps and by bytes, and compares it.

    python -m thalweg.examples.gpt.plot out/gpt

writes loss.png there, and prints a table over the seeds. Needs matplotlib (`pip install
thalweg[examples]`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

_FIRST = "ddp"
Curve = Sequence[Mapping[str, float]]  # step, loss and sent
Runs = Mapping[str, Mapping[int, Curve]]  # by way and seed


def read(folder: Path) -> dict[str, dict[int, Curve]]:
    """Returns the curves in a folder, DistributedDataParallel's first. ValueError: there is none of
    it.
    """
    found: dict[str, dict[int, Curve]] = {_FIRST: {}}
    for path in sorted(folder.glob("*.json")):
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(run["way"], {})[run["seed"]] = run["curve"]
    if not found[_FIRST]:
        raise ValueError(f"{folder} has no {_FIRST}-SEED.json: train with --ways {_FIRST} …")
    return found


def table(runs: Runs) -> str:
    """Returns a Markdown table of the last losses: means over the seeds, and how much more than
    DistributedDataParallel with the same seed, in the mean and from the least to the most.
    """
    lines = ["| way | seeds | loss | more | bytes a step | less |", "|---|---|---|---|---|---|"]
    ends = {way: {s: curve[-1] for s, curve in seeds.items()} for way, seeds in runs.items()}
    first = ends[_FIRST]
    for way, seeds in ends.items():
        loss = mean(end["loss"] for end in seeds.values())
        each = mean(end["sent"] / end["step"] for end in seeds.values())
        less = mean(end["sent"] / end["step"] for end in first.values()) / each
        more = [100 * (e["loss"] / first[s]["loss"] - 1) for s, e in seeds.items() if s in first]
        beside = f"{mean(more):+.1f} % ({min(more):+.1f} to {max(more):+.1f})" if more else ""
        lines.append(f"| {way} | {len(seeds)} | {loss:.4f} | {beside} | {each:.0f} | {less:.1f}x |")
    return "\n".join(lines)


def draw(runs: Runs, path: Path) -> None:
    """Draws the losses, means over the seeds, by steps and by bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    for way, seeds in runs.items():
        points = list(zip(*seeds.values(), strict=False))  # of each look that all seeds have
        steps = [one[0]["step"] for one in points]
        losses = [mean(each["loss"] for each in one) for one in points]
        sent = [mean(each["sent"] for each in one) / 1e6 for one in points]
        by_steps.plot(steps, losses, label=way, marker="o", ms=3, lw=1)
        by_bytes.plot(sent, losses, label=way, marker="o", ms=3, lw=1)
    by_steps.set(xlabel="steps", ylabel="loss of the test text")
    by_bytes.set(xlabel="MB that a node has sent", xscale="log")
    by_steps.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plot", description="Draws and compares trainings.")
    parser.add_argument("folder", type=Path, help="--out of the trainings")
    folder: Path = parser.parse_args(argv).folder
    try:
        runs = read(folder)
    except ValueError as error:
        print(f"gpt: {error}", file=sys.stderr)
        return 2
    draw(runs, folder / "loss.png")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
