#!/usr/bin/env python3
"""Trains the GPT of thalweg.examples.gpt_local by plain DiLoCo, in one process without Thalweg.

    scripts/plain_diloco.py --every 50 --outer-lr 0.7 --outer-momentum 0.5 --steps 400 --seed 1

The weights that the example begins with, its text and its settings, so that the losses are to be
those of its way "50"; `--every 0` is its "ddp", and `--workers 1 --every 0` a worker alone.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from thalweg.examples.gpt import text
from thalweg.examples.gpt.model import Gpt

LENGTH = 64
TESTS = 256
STREAMS = 2  # of text, whatever trains with them


class Worker:
    """A model that trains by itself."""

    def __init__(self, first: nn.Module, options: argparse.Namespace) -> None:
        self.model = copy.deepcopy(first)
        settings = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = AdamW(self.model.parameters(), **settings)
        self.schedules = [
            LinearLR(self.optimizer, 0.05, total_iters=options.steps // 10),
            CosineAnnealingLR(self.optimizer, options.steps),
        ]

    def step(self, batches: list[torch.Tensor]) -> None:
        """Takes a step with the mean of these batches' gradients."""
        self.optimizer.zero_grad()
        for batch in batches:
            (self.model(batch) / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for schedule in self.schedules:
            schedule.step()


@torch.no_grad()
def exchange(outer: nn.Module, optimizer: SGD, workers: list[Worker]) -> None:
    """Steps with the mean of what workers have changed, and gives them the weights."""
    of_workers = zip(*(worker.model.parameters() for worker in workers), strict=True)
    for weights, theirs in zip(outer.parameters(), of_workers, strict=True):
        weights.grad = weights - torch.stack(theirs).mean(0)
    optimizer.step()
    for worker in workers:
        worker.model.load_state_dict(outer.state_dict())


@torch.no_grad()
def loss_of(model: nn.Module, data: text.Text) -> float:
    return sum(float(model(piece)) for piece in data.tests(TESTS, LENGTH).split(32)) / (TESTS / 32)


def train(options: argparse.Namespace) -> float:
    """Returns the loss of files in which nobody trains."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data, outer = text.load(), Gpt(256, 4, length=LENGTH)
    momentum = options.outer_momentum
    optimizer = SGD(
        outer.parameters(), lr=options.outer_lr, momentum=momentum, nesterov=momentum > 0
    )
    count = options.workers if options.every else 1
    workers = [Worker(outer, options) for _ in range(count)]
    for step in range(1, options.steps + 1):
        first = (options.seed * options.steps + step) * STREAMS
        batches = [data.batch(8, LENGTH, first + rank) for rank in range(options.workers)]
        for rank, worker in enumerate(workers):
            worker.step([batches[rank]] if options.every else batches)
        if options.every and (step % options.every == 0 or step == options.steps):
            exchange(outer, optimizer, workers)
    return loss_of(workers[0].model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, choices=(1, 2))
    parser.add_argument("--every", type=int, default=50, help="0: gradients in every step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    print(f"loss {train(parser.parse_args()):.4f}")


if __name__ == "__main__":
    main()
