#!/usr/bin/env python3
"""Trains on four nodes of which one is lost and comes back, and compares it with four throughout.

Each node is a worker of thalweg.examples.fashion_elastic on this machine, with a sidecar that hosts
a shard. One is killed after a third of the training, and started again after another third. Prints
a table, and writes rows.json and elastic-curve.png to --out. A training that is in rows.json is not
run again. Needs an installed thalweg.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg import _binaries
from thalweg._job import _processes
from thalweg._job._addresses import free_port
from thalweg_bench import plots

OUT = Path(__file__).resolve().parent.parent / "out" / "elastic_curve"
NODES = 4
VICTIM = 2
EPOCHS = 3  # with fewer, the others may end before the victim is back
LIMIT = 900.0  # seconds of a training
POINTS = 60  # of a curve: each is the mean loss of as long a part of the training


class Node:
    """A worker and its sidecar, whose logs go on when the node starts again."""

    def __init__(self, number: int, addresses: list[str], folder: Path, options: list[str]) -> None:
        self._log = folder / f"{number}.json"
        self.output = folder / f"{number}.txt"
        self._socket = folder / f"{number}.sock"
        self._argv = [sys.executable, "-m", "thalweg.examples.fashion_elastic", *options]
        self._argv += ["--out", str(self._log)]
        self._env = os.environ | {
            "THALWEG_ELASTIC": ",".join(addresses),
            "THALWEG_ELASTIC_NODE": str(number),
            "THALWEG_SIDECAR": str(self._socket),
            "THALWEG_RECONNECT": "3",
            "OMP_NUM_THREADS": "1",
        }
        self.start()

    def start(self) -> None:
        argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", str(self._socket)]
        argv += ["--aggregators", "", "--shard-listen", "127.0.0.1:0"]
        with self.output.open("ab") as output:
            ends_with_us = _processes.die_with_parent(signal.SIGKILL)
            self._sidecar = _processes.Server(
                "sidecar", argv, env=self._env, stderr=output, preexec=ends_with_us
            )
            self._sidecar.wait_ready(30)
            self.worker = subprocess.Popen(
                self._argv, env=self._env, stdout=output, stderr=output, preexec_fn=ends_with_us
            )

    def kill(self) -> None:
        for process in (self.worker, self._sidecar.process):
            process.kill()
            process.wait()

    def entries(self) -> list[dict[str, Any]]:
        """Returns what the worker has written, also in earlier lives."""
        if not self._log.exists():
            return []
        lines = self._log.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]


def await_that(happens: Callable[[], bool], nodes: list[Node], deadline: float) -> None:
    """Raises RuntimeError where a worker has failed, TimeoutError at the deadline."""
    while not happens():
        for node in nodes:
            if node.worker.poll() not in (None, 0, -signal.SIGKILL):
                raise RuntimeError(f"a worker has failed: see {node.output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"a training takes longer than {LIMIT:.0f} s")
        time.sleep(0.05)


def train(folder: Path, seed: int, args: argparse.Namespace, *, loses: bool) -> dict[str, Any]:
    """Returns a row. With `loses` a node is killed, and started again."""
    folder.mkdir(parents=True)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(NODES)]
    options = ["--seed", str(seed), "--epochs", str(EPOCHS), "--data", str(args.data)]
    nodes: list[Node] = []
    deadline = time.monotonic() + LIMIT
    try:
        nodes += [Node(number, addresses, folder, options) for number in range(NODES)]
        for third, event in ((1, nodes[VICTIM].kill), (2, nodes[VICTIM].start)) if loses else ():
            due = third * EPOCHS / 3
            await_that(functools.partial(has_done, nodes[0], due), nodes, deadline)
            event()
        ended = [node.worker for node in nodes]
        await_that(lambda: all(worker.poll() == 0 for worker in ended), nodes, deadline)
        return row_of([node.entries() for node in nodes], seed, loses=loses)
    finally:
        for node in nodes:
            node.kill()


def has_done(node: Node, epochs: float) -> bool:
    """Returns whether so many epochs are over."""
    return any(entry.get("epochs", 0.0) >= epochs for entry in node.entries())


def row_of(logs: list[list[dict[str, Any]]], seed: int, *, loses: bool) -> dict[str, Any]:
    """Returns what became of a training, from what its workers have written."""
    # What was not committed when the node was lost was done again: the last entry of a step counts.
    steps = [{e["step"]: e for e in log if "step" in e} for log in logs]
    parts: dict[int, list[float]] = {}
    for own in steps:
        for entry in own.values():
            parts.setdefault(int(entry["epochs"] / EPOCHS * POINTS), []).append(entry["loss"])
    return {
        "seed": seed,
        "loses": loses,
        "steps": max(steps[0]),
        "with_fewer": [e["epochs"] for e in steps[0].values() if e["workers"] < NODES],
        "curve": [(part * EPOCHS / POINTS, statistics.mean(parts[part])) for part in sorted(parts)],
        "accuracy": next(e["accuracy"] for e in reversed(logs[0]) if "accuracy" in e),
        "same_weights": all(log[-1]["replicas_identical"] for log in logs),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| nodes | seed | steps | of them with 3 nodes | last training loss | test accuracy, % |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["loses"]):
        nodes = "4, 3, 4" if row["loses"] else "4"
        loss, percent = row["curve"][-1][1], 100 * row["accuracy"]
        fewer = len(row["with_fewer"])
        lines.append(
            f"| {nodes} | {row['seed']} | {row['steps']} | {fewer} | {loss:.4f} | {percent:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss by epoch: means over seeds, in bands from smallest to largest."""
    figure = plots.new_figure()
    axes = figure.add_subplot()
    for loses, label, colour in ((False, "4 nodes", "tab:blue"), (True, "4, 3, 4", "tab:orange")):
        curves = [row["curve"] for row in rows if row["loses"] == loses]
        if not curves:
            continue
        same = list(zip(*curves, strict=True))
        epochs = [points[0][0] for points in same]
        values = [[point[1] for point in points] for points in same]
        axes.plot(epochs, [statistics.mean(v) for v in values], color=colour, label=label)
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
    fewer = [row["with_fewer"] for row in rows if row["with_fewer"]]
    if fewer:
        begin, end = min(f[0] for f in fewer), max(f[-1] for f in fewer)
        axes.axvspan(begin, end, color="grey", alpha=0.15, linewidth=0, label="3 nodes")
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for seed in args.seeds:
        for loses in (False, True):
            if any((row["seed"], row["loses"]) == (seed, loses) for row in rows):
                continue
            folder = args.out / f"seed{seed}-{'loses' if loses else 'keeps'}"
            rows.append(train(folder, seed, args, loses=loses))
            print(f"seed {seed}, {'4, 3, 4' if loses else '4'} nodes: {rows[-1]['accuracy']:.4f}")
            path.write_text(json.dumps(rows), encoding="utf-8")
    print(table(rows))
    draw(rows, args.out / "elastic-curve.png")
    return 0 if all(row["same_weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
