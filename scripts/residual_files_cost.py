#!/usr/bin/env python3
"""Measures what files of residuals cost: `thalweg run --nodes 2 scripts/residual_files_cost.py`.

Steps with and without them are done in turns. Then checkpoints of 100 MB of residuals.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._attach import _residuals

TURNS, STEPS = 40, 25


class Training(NamedTuple):
    """A model with its optimizer, trained on the same samples in each step."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: thalweg.ddp.State
    inputs: torch.Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()


def training(layers: torch.nn.Module, features: int, residuals: str) -> Training:
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = thalweg.ddp.attach(model, "powersgd:rank=4,start=1", residuals=residuals)
    return Training(model, optimizer, state, torch.randn(64, features))


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def describe(what: str, seconds: list[float]) -> None:
    low, middle, high = (1e3 * one for one in statistics.quantiles(seconds, n=4))
    print(f"rank {dist.get_rank()}, {what}: median {middle:.3f} ms, {low:.3f} to {high:.3f} ms")


def measure_steps(folder: str, looks: list[float]) -> None:
    def small(residuals: str) -> Training:
        layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
        return training(torch.nn.Sequential(*layers), 256, residuals)

    both = {"step without files": small(""), "step with files": small(folder)}
    times: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(TURNS):
        for name, one in both.items():
            times[name] += [seconds_of(one.step) for _ in range(STEPS)]
    for name, seconds in times.items():
        describe(name, seconds)
    describe("look", looks)
    for one in both.values():
        one.state.close()


def measure_checkpoints(folder: str, looks: list[float]) -> None:
    for name, residuals in (("without files", ""), ("with files", folder)):
        one = training(torch.nn.Linear(5000, 5000, bias=False), 5000, residuals)
        times = []
        looks.clear()
        for _ in range(5):
            one.step()
            one.step()
            if dist.get_rank() == 0:
                times.append(seconds_of(one.optimizer.state_dict))
            dist.barrier()
        one.step()
        if dist.get_rank() == 0:
            describe(f"state_dict() {name}", times)
        elif residuals:
            describe("look that finds a note", sorted(looks)[-5:])
        one.state.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    looks: list[float] = []
    look = _residuals.ResidualKeeper.look

    def timed(keeper: _residuals.ResidualKeeper) -> None:
        looks.append(seconds_of(lambda: look(keeper)))

    _residuals.ResidualKeeper.look = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        measure_steps(folder, looks)
        measure_checkpoints(folder, looks)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
