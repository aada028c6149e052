#!/usr/bin/env python3
"""Trains on Fashion-MNIST with 2 nodes x 2 workers and 2 aggregators, beside plain DDP over Gloo.

Writes out/demo/fashion_mnist.png and out/demo/summary.json. Needs an installed thalweg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"
MIN_ACCURACY = 0.85
RUNS = {
    "Thalweg, fp16": ["--shards", "2", "--codec", "fp16"],
    "plain DDP over Gloo": [],
}


def train(title: str, options: list[str], epochs: int) -> dict[str, Any]:
    print(f"== {title}: 2 nodes x 2 workers, {epochs} epochs", flush=True)
    out = OUT / ("thalweg.json" if options else "gloo.json")
    command = [sys.executable, "-m", "thalweg", "run", "--nodes", "2", "--nproc", "2", *options]
    command += ["-m", "thalweg.examples.fashion_mnist", "--epochs", str(epochs)]
    command += ["--min-accuracy", str(MIN_ACCURACY), "--out", str(out)]
    if not options:
        command.append("--plain")
    subprocess.run(command, check=True)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def plot(histories: dict[str, dict[str, Any]]) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for title, history in histories.items():
        losses = history["step_losses"]
        window = max(1, len(losses) // 60)
        starts = range(0, len(losses) - window + 1, window)
        means = [sum(losses[i : i + window]) / window for i in starts]
        left.plot([i + window / 2 for i in starts], means, label=title)
        epochs = history["epochs"]
        right.plot(
            [e["epoch"] for e in epochs],
            [100 * e["accuracy"] for e in epochs],
            marker="o",
            label=f"{title}: {100 * history['accuracy']:.1f} %",
        )
    left.set(xlabel="step", ylabel="training loss", title=f"Loss (mean of {window} steps)")
    right.set(xlabel="epoch", ylabel="test accuracy, %", title="Accuracy on 10 000 test images")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("Fashion-MNIST, 4 workers on 2 nodes")
    path = OUT / "fashion_mnist.png"
    figure.savefig(path, dpi=130)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        histories = {t: train(t, options, args.epochs) for t, options in RUNS.items()}
    except subprocess.CalledProcessError as error:
        print(f"demo: the training failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    summary = {
        title: {key: value for key, value in history.items() if key != "step_losses"}
        for title, history in histories.items()
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture = plot(histories)
    print("== results")
    for title, history in histories.items():
        same = "bit-identical" if history["replicas_identical"] else "DIFFERENT"
        print(
            f"{title}: accuracy {history['accuracy']:.4f}, replicas {same}, "
            f"{history['train_seconds']:.1f} s"
        )
    print("(one machine: no network is saved, and its cores are shared; times say little)")
    print(f"{picture} and summary.json written; {time.monotonic() - started:.0f} s altogether")
    return 0


if __name__ == "__main__":
    sys.exit(main())
