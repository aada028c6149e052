"""Measures tokens per second and memory of each precision with each strategy, as a table.

All are measured by the same workers, one after another.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thalweg.examples.t5 import loop
from thalweg.examples.t5.data import Functions
from thalweg.examples.t5.model import PRECISIONS, STRATEGIES, Setup, state_bytes

_WARM_UP = 2  # steps


class Measured(NamedTuple):
    """One row of the table; memory is that of the worker that needs most."""

    precision: str
    strategy: str
    tokens_per_second: float  # of all workers
    state_mb: float  # parameters, gradients and optimizer state that a worker keeps
    peak_mb: float  # by how much a worker's memory grew meanwhile
    loss: float  # of the last step


def setups(kind: int) -> list[Setup]:
    """Returns all that can be compared: DistributedDataParallel only as it is."""
    both = [
        Setup(strategy, precision, kind) for precision, strategy in product(PRECISIONS, STRATEGIES)
    ]
    return [setup for setup in both if not setup.problem()]


def measure(
    setup: Setup,
    start: Callable[[Setup], tuple[nn.Module, Optimizer, Callable[[torch.Tensor], None]]],
    data: Functions,
    *,
    batch: int,
    steps: int,
) -> Measured:
    """Measures `steps` steps after two more. `start` returns a new model, its optimizer and what
    updates them by a loss.
    """
    rows = loop.batches(data, batch, 0, 0)[: _WARM_UP + steps]
    if len(rows) <= _WARM_UP:
        raise ValueError(f"the data set has {len(rows)} steps, expected {_WARM_UP + 1} or more")
    with loop.peak_memory() as peak:
        before = _resident_mb()
        model, optimizer, update = start(setup)
        loss, kept = torch.zeros(()), 0
        for index, batch_rows in enumerate(rows):
            if index == _WARM_UP:
                dist.barrier()
                begun = time.monotonic()
            optimizer.zero_grad()
            loss = loop.loss_of(model, data, batch_rows)
            update(loss)
            kept = state_bytes(model, optimizer)
        dist.barrier()
        seconds = time.monotonic() - begun
    tokens = sum(loop.tokens_of(data, batch_rows) for batch_rows in rows[_WARM_UP:])
    sums = torch.tensor([float(tokens), float(loss.detach())], dtype=torch.float64)
    most = torch.tensor([kept / 1e6, peak[0] - before if peak else 0.0], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    del model, optimizer, update
    gc.collect()
    return Measured(
        setup.precision,
        setup.strategy,
        tokens_per_second=float(sums[0]) / seconds,
        state_mb=float(most[0]),
        peak_mb=float(most[1]),
        loss=float(sums[1]) / dist.get_world_size(),
    )


def text(rows: Sequence[Measured]) -> str:
    """Returns the table as Markdown."""
    lines = [
        "| precision | strategy | tokens/s | state, MB | peak, MB | loss |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.precision} | {row.strategy} | {row.tokens_per_second:.0f} | {row.state_mb:.2f} "
        f"| {row.peak_mb:.0f} | {row.loss:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, rows: Sequence[Measured], about: dict[str, Any]) -> None:
    """Writes table.md, table.json and table.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text(rows), encoding="utf-8")
    content = {"about": about, "rows": [row._asdict() for row in rows]}
    (folder / "table.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(folder / "table.png", rows)


def draw(path: Path, rows: Sequence[Measured]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    strategies = list(dict.fromkeys(row.strategy for row in rows))
    precisions = list(dict.fromkeys(row.precision for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(precisions)
    for place, precision in enumerate(precisions):
        mine = [row for row in rows if row.precision == precision]
        where = [strategies.index(row.strategy) + place * width for row in mine]
        axes[0].bar(where, [row.tokens_per_second for row in mine], width, label=precision)
        axes[1].bar(where, [row.state_mb for row in mine], width, label=precision)
    for one, title in zip(
        axes, ("tokens/s of all workers", "MB of state in each worker"), strict=True
    ):
        one.set_xticks([i + 0.4 - width / 2 for i in range(len(strategies))], strategies)
        one.set(title=title, xlabel="strategy")
        one.grid(axis="y", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _resident_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 2**20
