"""Trains models with a LocalOptimizer; CASES are the ways to exchange."""

from typing import Any

import torch
import torch.distributed as dist
from coded_means import Cast, Int8, SignMean, SparseMean
from diloco import Settings
from torch import Tensor, nn
from torch.nn import functional

from thalweg.optim import FusedAdamW
from thalweg.ps import LocalOptimizer, Signs, Sparse

# How a model with parts of 64 x 100, 100 x 100 and 100 x 10 weights is exchanged: by name, the
# arguments of LocalOptimizer and what they mean. The largest parameter is the first fragment, and
# those that follow fill up the second one.
_HALVES = [["2.weight"], ["0.weight", "0.bias", "2.bias", "3.weight", "3.bias"]]
# How many rows of its bucket are before each parameter's, and how long these are. A bucket begins
# with 3.bias, and the largest weights have one of their own, as 0.bias has without fragments.
_ROWS = {
    "3.bias": (0, 10),
    "3.weight": (1, 100),
    "2.bias": (11, 100),
    "0.bias": (0, 100),
    "2.weight": (0, 100),
    "0.weight": (0, 64),
}
CASES: dict[str, tuple[dict[str, Any], Settings]] = {
    "plain": ({}, Settings(5)),
    "fragments": ({"fragments": 2}, Settings(5, (2, 5), _HALVES)),
    "delayed": ({"delay": 2, "mix": 0.25}, Settings(5, delay=2, mix=0.25)),
    "streaming": (
        {"fragments": 2, "delay": 3, "mix": 0.5},
        Settings(5, (2, 5), _HALVES, delay=3, mix=0.5),
    ),
    # Powers of two, so that workers and reference multiply differences by the same.
    "weighted": ({"weighted": True}, Settings(5, shares=(0.25, 0.75))),
    "adam": ({"outer": {"name": "adam", "lr": 0.01}}, Settings(5)),
    "rounded": ({"pull": "bf16"}, Settings(5, pull=torch.bfloat16)),
    "fp16": ({"codec": "fp16"}, Settings(5, mean=lambda: Cast(torch.float16))),
    "bf16": ({"codec": "bf16"}, Settings(5, mean=lambda: Cast(torch.bfloat16))),
    "int8": ({"codec": "int8:start=0"}, Settings(5, mean=Int8)),
    "int8 adam": (
        {"codec": "int8:start=0", "outer": {"name": "adam", "lr": 0.01}},
        Settings(5, mean=Int8),
    ),
    "int8 delayed": (
        {"codec": "int8:start=0", "fragments": 2, "delay": 3, "mix": 0.5},
        Settings(5, (2, 5), _HALVES, delay=3, mix=0.5, mean=Int8),
    ),
    # The first exchange is not compressed; the checkpoint comes after it.
    "powersgd": ({"codec": "powersgd:rank=2,start=1,min_rate=1"}, Settings(5)),
    "sparse": (
        {"codec": "sparse:0.02", "outer": {"name": "sgd", "lr": 0.7}},
        Settings(5, mean=lambda: SparseMean(0.02)),
    ),
    "sparse delayed": (
        {"codec": Sparse(0.3), "fragments": 2, "delay": 3, "mix": 0.5},
        Settings(5, (2, 5), _HALVES, delay=3, mix=0.5, mean=lambda: SparseMean(0.3)),
    ),
    "signs": ({"codec": "signs"}, Settings(5, mean=lambda: SignMean(4, _ROWS))),
    "signs delayed": (
        {"codec": Signs(3), "fragments": 2, "delay": 3, "mix": 0.5, "weighted": True},
        Settings(
            5,
            (2, 5),
            _HALVES,
            delay=3,
            mix=0.5,
            shares=(0.25, 0.75),
            mean=lambda: SignMean(3, _ROWS | {"0.bias": (12, 100)}),
        ),
    ),
}


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 10))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.Generator().manual_seed(1000 * step + rank)
    inputs, wanted = (torch.randn(8, size, generator=data) for size in (64, 10))
    return functional.mse_loss(model(inputs), wanted)


class Trainer:
    """A worker, whose learning rate falls."""

    def __init__(self, seed: int, every: int, **options: Any) -> None:
        self.model = make_model(seed)
        inner = FusedAdamW(self.model.named_parameters(), lr=1e-2)
        self.optimizer = LocalOptimizer(inner, every=every, bucket_cap_mb=0.02, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.9)
        self.work = 1.0 + 2 * dist.get_rank() if options.get("weighted") else 0.0
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), self.step).backward()
            if self.work:
                self.optimizer.count(self.work)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1


def one_weight(every: int, inner_lr: float, target: float = 0.0, **options: Any) -> Any:
    """Returns a weight that begins with 1, and a function that does a step towards the target."""
    weight = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=inner_lr)
    optimizer = LocalOptimizer(inner, every=every, **options)

    def step(work: float = 0.0) -> float:
        optimizer.zero_grad()
        (weight - target).square().div(2).sum().backward()
        if work:
            optimizer.count(work)
        optimizer.step()
        return weight.item()

    return weight, optimizer, step
