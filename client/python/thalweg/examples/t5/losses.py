"""Trains with each codec and several seeds, and compares the losses with those of float32.

All is trained by the same workers, one after another.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

import thalweg.fsdp
from thalweg.examples.t5 import loop
from thalweg.examples.t5.data import Functions
from thalweg.examples.t5.model import SHARD_CODECS, Setup

LAST = 20  # steps whose mean is the loss of a training
_EXACT = "fp32"
# What sums over copies of shards take besides those of shards.
_COPY_CODECS = ("onebit", "topk:0.05", "powersgd:rank=4,start=10")

Start = Callable[[Setup, int], tuple[nn.Module, Optimizer, Callable[[torch.Tensor], None]]]


class Plan(NamedTuple):
    """How each training goes."""

    steps: int
    seeds: int
    batch: int
    lr: float
    gamma: float  # factor of lr after each epoch


class Trained(NamedTuple):
    """One codec, with all seeds."""

    strategy: str
    codec: str
    losses: list[float]  # by seed: of the last steps, the mean over all workers

    def apart(self, exact: Sequence[float]) -> list[float]:
        """Returns, by seed, by what part the loss is above that of float32."""
        return [ours / theirs - 1 for ours, theirs in zip(self.losses, exact, strict=True)]


def setups(only: Sequence[str]) -> list[Setup]:
    """Returns all strategies and codecs that are compared, each strategy's exact one first; those
    of the codecs `only` if there are any.
    """
    both = [Setup(codec=codec) for codec in SHARD_CODECS]
    both += [Setup("hybrid", codec=codec) for codec in (*SHARD_CODECS, *_COPY_CODECS)]
    if not only:
        return both
    made = [Setup(strategy, codec=codec) for strategy in ("full", "hybrid") for codec in only]
    wanted = [setup for setup in made if setup.codec != _EXACT and not setup.problem()]
    used = dict.fromkeys(setup.strategy for setup in wanted)
    return [
        setup
        for strategy in used
        for setup in (Setup(strategy), *(one for one in wanted if one.strategy == strategy))
    ]


def train(setup: Setup, start: Start, data: Functions, plan: Plan) -> Trained:
    """Trains with each seed, which chooses weights and order. `start` returns a new model, its
    optimizer and what updates them by a loss.
    """
    losses = [_loss(setup, start, data, plan, seed) for seed in range(1, plan.seeds + 1)]
    return Trained(setup.strategy, setup.codec, losses)


def _loss(setup: Setup, start: Start, data: Functions, plan: Plan, seed: int) -> float:
    model, optimizer, update = start(setup, seed)
    found: list[torch.Tensor] = []
    steps = tqdm(
        _steps(data, plan, seed),
        desc=f"{setup.strategy} {setup.codec}, seed {seed} of {plan.seeds}",
        total=plan.steps,
        unit="step",
        disable=dist.get_rank() != 0,
    )
    for epoch, rows in steps:
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * plan.gamma**epoch
        optimizer.zero_grad()
        loss = loop.loss_of(model, data, rows)
        update(loss)
        found.append(loss.detach().double())
    last = torch.stack(found[-LAST:]).mean()
    dist.all_reduce(last)
    if (state := thalweg.fsdp.state_of(model)) is not None:
        state.close()
    del model, optimizer, update
    gc.collect()
    return float(last) / dist.get_world_size()


def _steps(data: Functions, plan: Plan, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the epoch and this worker's rows of each step."""
    left, epoch = plan.steps, 0
    while left > 0:
        rows = loop.batches(data, plan.batch, epoch, seed)[:left]
        yield from ((epoch, batch) for batch in rows)
        left, epoch = left - len(rows), epoch + 1


def text(rows: Sequence[Trained]) -> str:
    """Returns the table as Markdown; each strategy's first row is exact."""
    seeds = range(1, len(rows[0].losses) + 1)
    lines = [
        f"| strategy | codec | {' | '.join(f'seed {seed}' for seed in seeds)} | above fp32, % | "
        "of the means, % |",
        "|---" * (4 + len(seeds)) + "|",
    ]
    exact: dict[str, list[float]] = {}
    for row in rows:
        theirs = exact.setdefault(row.strategy, row.losses)
        apart = " ".join(f"{100 * part:+.2f}" for part in row.apart(theirs))
        whole = 100 * (mean(row.losses) / mean(theirs) - 1)
        values = " | ".join(f"{loss:.4f}" for loss in row.losses)
        lines.append(f"| {row.strategy} | {row.codec} | {values} | {apart} | {whole:+.2f} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, rows: Sequence[Trained], about: dict[str, Any]) -> None:
    """Writes losses.md and losses.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "losses.md").write_text(text(rows), encoding="utf-8")
    content = {"about": about, "rows": [row._asdict() for row in rows]}
    (folder / "losses.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
