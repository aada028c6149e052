"""Trains the same model with its optimizer on the shards, and with the same one on the workers."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from endings import is_over
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
import thalweg.optim
from thalweg.ps import ServerOptimizer

BUCKET_MB = 0.05  # several buckets

# By name: the kind, the same optimizer on the worker, and the options of both.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("sgd", thalweg.optim.FusedSGD, {"lr": 0.05}),
    "nesterov": (
        "sgd",
        thalweg.optim.FusedSGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    ),
    "dampened": ("sgd", thalweg.optim.FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "adam": ("adam", thalweg.optim.FusedAdam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "adamw": ("adamw", thalweg.optim.FusedAdamW, {"lr": 1e-2, "betas": (0.8, 0.95)}),
    "maximize": ("adamw", thalweg.optim.FusedAdamW, {"lr": 1e-3, "maximize": True}),
    "lamb": ("lamb", thalweg.optim.FusedLAMB, {"lr": 1e-2, "weight_decay": 1e-2}),
    "nvlamb": (
        "lamb",
        thalweg.optim.FusedLAMB,
        {"lr": 1e-2, "use_nvlamb": True, "adam_w_mode": False, "weight_decay": 1e-3},
    ),
}


class Branching(nn.Module):
    """A model of which workers use other parts by their rank and in each forward pass."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 100)
        self.heads = nn.ModuleList(nn.Linear(100, 10) for _ in range(4))
        self.bypass = nn.Linear(64, 10)
        self.register_buffer("passes", torch.tensor(0))  # goes with checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, rank = int(self.passes), dist.get_rank()
        self.passes += 1
        is_last = rank == dist.get_world_size() - 1
        if number % 7 == 4 or (number % 5 == 3 and is_last):
            return self.bypass(x)
        # All use the same head, or others; none uses the last one for long.
        head = (1, rank % 2, 2 * (rank % 2), 3 if number > 8 else 0)[number % 4]
        return self.heads[head](self.trunk(x).tanh())


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if _unused():
        return Branching()
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 10))
    model[0].bias.requires_grad_(False)
    # Two parameters in one piece of memory, as some libraries have them.
    both = torch.cat([model[2].weight, model[3].weight]).detach()
    model[2].weight, model[3].weight = (nn.Parameter(part) for part in both.split([100, 10]))
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the weights, and the biases in a group of their own without decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")]},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


class Trainer:
    """Takes steps on data that depend on the rank and the step alone.

    With a scaler, every fourth step has an infinite gradient on one rank.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=3, enabled=bool(_scaling())
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
        self.step = 0
        self.skipped = 0  # steps

    def loss(self, part: int = 0) -> torch.Tensor:
        seed = 1000 * self.step + 10 * dist.get_rank() + part
        data = torch.Generator().manual_seed(seed)
        loss = self.model(torch.randn(8, 64, generator=data)).square().mean()
        overflows = self.step % 4 == 2 and dist.get_rank() == dist.get_world_size() - 1
        return loss * float("inf") if self.scaler.is_enabled() and overflows else loss

    def train(self, steps: int, passes: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.held_back():
                for part in range(1, passes):
                    self.scaler.scale(self.loss(part)).backward()
            loss = self.scaler.scale(self.loss())
            if not self.idles():
                loss.backward()
            elif isinstance(self.model, DistributedDataParallel):
                (0 * loss).backward()
            if _scaling() == "unscaled":
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            before = self.scaler.get_scale()
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < before
            self.scheduler.step()
            self.step += 1

    def train_to_the_end(self, steps: int, passes: int) -> None:
        """Takes so many steps, or goes on until there is a file UNTIL."""
        while not is_over(self.step, steps):
            self.train(1, passes)

    def idles(self) -> bool:
        """Whether this rank has no gradient in this step.

        DistributedDataParallel needs zeros, and takes their parameters for used: it is a step in
        which the other ranks use the same ones.
        """
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return _unused() == "idle" and is_last and self.step % 12 == 0

    def held_back(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.optimizer, ServerOptimizer):
            return self.optimizer.accumulate()
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()


def _scaling() -> str:
    """Returns how a GradScaler is used; "": there is none."""
    return os.environ.get("SCALING", "")


def _unused() -> str:
    """Returns how parameters lack gradients in some steps; "": they do not."""
    return os.environ.get("UNUSED", "")


def _bound() -> float | None:
    return float(os.environ["CLIP"]) if "CLIP" in os.environ else None


def on_servers(case: str) -> Trainer:
    kind, _, options = CASES[case]
    model = make_model(dist.get_rank())  # rank 0's count
    optimizer = ServerOptimizer(
        groups_of(model),
        kind,
        bucket_cap_mb=BUCKET_MB,
        codec=os.environ.get("CODEC"),
        pull=os.environ.get("PULL"),
        max_grad_norm=_bound(),
        loss_scaling=bool(_scaling()),
        overlap="OVERLAP" in os.environ,
        find_unused_parameters=bool(_unused()),
        chunk_bytes=int(os.environ.get("CHUNK_BYTES", "0")) or None,
        **options,
    )
    return Trainer(model, optimizer)


def on_workers(case: str) -> Trainer:
    kind, make, options = CASES[case]
    if kind != "lamb" or _bound() is not None:  # LAMB's own default is another one
        options = options | {"max_grad_norm": _bound()}
    model = DistributedDataParallel(
        make_model(dist.get_rank()),
        bucket_cap_mb=BUCKET_MB,
        find_unused_parameters=bool(_unused()),
    )
    thalweg.ddp.attach(model, os.environ.get("CODEC"))
    return Trainer(model, make(groups_of(model.module), **options))
