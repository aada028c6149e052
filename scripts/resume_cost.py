#!/usr/bin/env python3
"""Measures what a resume costs the loss: `thalweg run --nodes 2 scripts/resume_cost.py`.

The network and the task are those of docs/tutorial.md, with other weights and data for each seed.
Every way of resuming goes on from the same step of the same undisturbed training. The loss is that
of 4096 samples in which nobody trains. Prints a line for each way and step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._attach._codec_states import with_residuals

CODEC = "powersgd:rank=4,start=20"
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
}
Losses = dict[int, float]  # by step


class Training:
    """A training of one seed. All workers make it together."""

    def __init__(self, seed: int, optimizer: str) -> None:
        torch.manual_seed(1)
        self._teacher = torch.randn(256, 4) @ torch.randn(4, 256) / 32
        self._held_out = torch.randn(4096, 256)
        torch.manual_seed(1000 + seed)
        layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.state = thalweg.ddp.attach(self.model, CODEC)
        self.done, self._seed = 0, seed

    def checkpoint(self) -> dict[str, Any]:
        """Returns model and optimizer as rank 0 saves them."""
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        box = [copy.deepcopy(saved) | {"done": self.done}]
        dist.broadcast_object_list(box)
        return box[0]

    def resume(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.done = saved["done"]

    def go_on(self, checks: list[int]) -> Losses:
        """Returns the losses after these steps, of which the last one ends the training."""
        losses = {}
        while self.done < checks[-1]:
            torch.manual_seed(100_000 * self._seed + 2 * self.done + dist.get_rank())
            inputs = torch.randn(64, 256)
            self.optimizer.zero_grad()
            mse_loss(self.model(inputs), inputs @ self._teacher).backward()
            self.optimizer.step()
            self.done += 1
            if self.done in checks:
                with torch.no_grad():
                    found = self.model.module(self._held_out)
                losses[self.done] = mse_loss(found, self._held_out @ self._teacher).item()
        return losses


def one_step_late(saved: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's state with what its node holds back after the next step."""
    return {
        key: with_residuals(value, later[key]) if isinstance(value, bytes) else value
        for key, value in saved.items()
    }


def trial(seed: int, options: argparse.Namespace) -> dict[str, Losses]:
    """Returns the losses of each way to train on."""
    undisturbed = Training(seed, options.optimizer)
    undisturbed.go_on([options.saved])
    saved, mine = undisturbed.checkpoint(), undisturbed.state.state_dict()
    box = [mine]
    dist.broadcast_object_list(box)
    undisturbed.go_on([options.saved + 1])
    late = one_step_late(mine, undisturbed.state.state_dict())
    files = mine if dist.get_rank() == 0 else late  # THALWEG_RESIDUALS
    losses = {"without a break": undisturbed.go_on(options.checks)}
    undisturbed.state.close()
    ways: dict[str, Callable[[thalweg.ddp.State], None]] = {
        "ordinary checkpoint": lambda _: None,
        "and the state of rank 0": lambda state: state.load_state_dict(box[0]),
        "and residuals one step late": lambda state: state.load_state_dict(late),
        "and residuals one step late, but for rank 0": lambda state: state.load_state_dict(files),
        "and the state of all workers": lambda state: state.load_state_dict(mine),
    }
    for way, load in ways.items():
        resumed = Training(seed, options.optimizer)
        resumed.resume(saved)
        load(resumed.state)
        losses[way] = resumed.go_on(options.checks)
        resumed.state.close()
    return losses


def report(trials: list[dict[str, Losses]], checks: list[int]) -> None:
    for step in checks:
        undisturbed = [losses["without a break"][step] for losses in trials]
        for way in trials[0]:
            found = [losses[way][step] for losses in trials]
            more = [x - y for x, y in zip(found, undisturbed, strict=True)]
            print(
                f"step {step}, {way}: loss {statistics.mean(found):.5f}, standard deviation "
                f"{statistics.stdev(found):.5f}; more than without a break: "
                f"{statistics.mean(more):.5f}, from {min(more):.5f} to {max(more):.5f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--saved", type=int, default=60, help="the step of the checkpoint")
    parser.add_argument("--checks", type=int, nargs="+", default=[120, 480])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trials = [trial(seed, options) for seed in range(options.seeds)]
    if dist.get_rank() == 0:
        report(trials, options.checks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
