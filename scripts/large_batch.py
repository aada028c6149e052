#!/usr/bin/env python3
"""Shows LAMB's purpose: batches of 4096 train as well as AdamW's of 128, on Fashion-MNIST.

Writes rows.json and large-batch.png to --out. A training that is in rows.json is not run again, so
that seeds can be added one by one. Needs an installed thalweg; a training takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from thalweg.examples.fashion_mnist import load
from thalweg.examples.fashion_models import MODELS
from thalweg.optim import FusedAdamW, FusedLAMB
from thalweg_bench import plots

OUT = Path(__file__).resolve().parent.parent / "out" / "large_batch"
DATA = Path("/usr/share/datasets/fashion-mnist")
WARM_UP = 0.1  # fraction of all steps, linear; then follows a cosine down to 0


@dataclass(frozen=True)
class Recipe:
    batch: int
    epochs: int
    build: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


# LAMB moves every tensor by about lr of its norm in each step, so lr does not grow with the batch:
# three times this one makes the loss jump before the warm-up is over.
RECIPES = {
    "AdamW, batch 128": Recipe(128, 10, lambda p: FusedAdamW(p, lr=1e-3, weight_decay=0.01)),
    "LAMB, batch 4096": Recipe(4096, 40, lambda p: FusedLAMB(p, lr=0.012, weight_decay=0.01)),
}


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    warm = max(1, round(WARM_UP * steps))
    parts = [LinearLR(optimizer, 1 / warm, total_iters=warm - 1)]
    parts.append(CosineAnnealingLR(optimizer, steps - warm))
    return SequentialLR(optimizer, parts, milestones=[warm])


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    parts = zip(images.split(500), labels.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(labels)


def train(name: str, seed: int) -> dict[str, Any]:
    """Returns a row: the curve has a point after each epoch."""
    recipe = RECIPES[name]
    images, labels = load(DATA, "train")
    test = load(DATA, "t10k")
    torch.manual_seed(seed)
    model = MODELS["cnn"]()
    optimizer = recipe.build(model.parameters())
    steps = len(labels) // recipe.batch
    rates = schedule(optimizer, recipe.epochs * steps)
    curve = []
    started = time.monotonic()
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        order = torch.randperm(len(labels))[: steps * recipe.batch]
        losses = []
        for batch in order.view(steps, recipe.batch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            rates.step()
            losses.append(loss.item())
        point = {
            "epoch": epoch,
            "loss": statistics.mean(losses),
            "accuracy": accuracy(model, *test),
        }
        curve.append(point)
        print(f"{name}, seed {seed}: {point}", flush=True)
    return {
        "name": name,
        "seed": seed,
        "epochs": recipe.epochs,
        "steps": recipe.epochs * steps,
        "accuracy": curve[-1]["accuracy"],
        "seconds": time.monotonic() - started,
        "curve": curve,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | epochs | steps | test accuracy, %: mean (smallest to largest) |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        percent = [100 * row["accuracy"] for row in own]
        lines.append(
            f"| {name} | {own[0]['epochs']} | {own[0]['steps']} | {statistics.mean(percent):.2f} "
            f"({min(percent):.2f} to {max(percent):.2f}) |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws loss and accuracy by epoch: means over seeds, in bands from smallest to largest."""
    figure = plots.new_figure()
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        curves = [row["curve"] for row in rows if row["name"] == name]
        for axes, key, unit in ((left, "loss", 1), (right, "accuracy", 100)):
            same = list(zip(*curves, strict=True))
            epochs = [points[0]["epoch"] for points in same]
            values = [[unit * point[key] for point in points] for points in same]
            means = [statistics.mean(v) for v in values]
            label = name if axes is right else ""
            axes.plot(epochs, means, color=f"C{number}", label=label)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(epochs, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(80, None))
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for seed in args.seeds:
        for name in RECIPES:
            if not any((row["name"], row["seed"]) == (name, seed) for row in rows):
                rows.append(train(name, seed))
                path.write_text(json.dumps(rows), encoding="utf-8")
    print(table(rows))
    draw(rows, args.out / "large-batch.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
