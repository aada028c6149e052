"""A worker that trains until it is killed: `watch_job.py NAME OUT`.

In each step rank 0 reads from the file "mode" beside OUT what all workers must do:

run     a step
slow    a step, for which the last rank is late
nan     a step with a loss that is no number on the last rank
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

# Every codec's metrics appear: auto decides for the first layer, rules for the others.
POLICY = "auto:rank=1,start=1;last.weight=int8;middle.weight=powersgd:rank=1,start=1"
MODES = ("run", "slow", "nan")
LATE_SECONDS = 0.2
STEP_SECONDS = 0.02  # leaves the machine to Prometheus


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.middle = nn.Linear(256, 256)
        self.last = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def pass_time(seconds: float) -> None:
    select.select([], [], [], seconds)


def read_mode(folder: Path) -> str:
    """Returns rank 0's mode on all workers."""
    number = torch.tensor(MODES.index((folder / "mode").read_text(encoding="utf-8")))
    dist.broadcast(number, 0)
    return MODES[int(number)]


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.1)
    thalweg.ddp.attach(model, codec=POLICY)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    while True:
        mode = read_mode(folder)
        pass_time(LATE_SECONDS if mode == "slow" and is_last else STEP_SECONDS)
        model.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()
        (loss * float("nan") if mode == "nan" and is_last else loss).backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[2]).parent)
