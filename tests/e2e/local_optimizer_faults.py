"""Contains jobs that ask a LocalOptimizer for what it cannot do, or end badly."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jobs import outcome
from local_optimizer_trainers import Trainer, loss_of, make_model, one_weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.amp
from thalweg.compat._apex_optimizers import FusedAdam
from thalweg.ps import LocalOptimizer


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    layer = nn.Linear(3, 3, bias=False)
    whole = layer.weight.detach()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer.weight = nn.Parameter(DTensor.from_local(whole, mesh))
    return layer


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors."""
    layer = nn.Linear(3, 3)
    rank = dist.get_rank()

    def make(module: nn.Module, **options: Any) -> str:
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        return outcome(lambda: LocalOptimizer(inner, **({"every": 4} | options)))

    optimizer = LocalOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), every=4)
    plain = torch.optim.SGD(layer.parameters(), lr=0.1).state_dict()
    state = optimizer.state_dict()
    model = nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    _, halved = thalweg.amp.initialize(model, inner, opt_level="O2", verbosity=0)
    fused = FusedAdam(nn.Linear(3, 3).half().parameters(), master_weights=True)
    later = state | {"local": state["local"] | {"steps": 5 * rank}}
    return [
        make(layer, every=0),
        make(layer, fragments=5),
        make(layer, fragments=3),
        make(layer, delay=4),
        make(layer, mix=1.0),
        make(layer, outer={"name": "lamb"}),
        make(layer, outer={"name": "sgd", "beta": 1}),
        make(layer, pull="int8"),
        make(layer, codec="sparse:2"),
        make(layer, codec="sign"),
        make(layer, codec="int8", pull="bf16"),
        make(layer, codec="signs", pull="fp32"),
        make(nn.Linear(3, 3).double()),
        make(_sharded()),
        make(nn.Linear(3, 3).requires_grad_(False)),
        make(layer, every=4 + rank),
        make(layer, outer={"name": "nesterov", "momentum": 0.5 + rank}),
        outcome(lambda: optimizer.add_param_group({"params": [torch.ones(1)]})),
        outcome(lambda: LocalOptimizer(halved, every=4)),
        outcome(lambda: LocalOptimizer(fused, every=4)),
        outcome(lambda: optimizer.load_state_dict(plain)),
        outcome(lambda: optimizer.load_state_dict(later)),
    ]


def broken() -> str:
    """Rank 0 does what BREAK says, in its second step or after an exchange; returns how the job
    ends.
    """
    how = os.environ["BREAK"]
    looks = how == "change_weights_and_look"  # while others are on their way
    trainer = Trainer(0, 3, delay=2 if looks else 0)
    trainer.train(3 if looks else 1)
    if dist.get_rank() != 0:
        return outcome(lambda: trainer.train(9))
    if how.startswith("change_weights"):
        with torch.no_grad():
            trainer.model[2].weight.mul_(0.5)
    if looks:
        trainer.optimizer.state_dict()
        trainer.optimizer.full_state_dict()
    if how == "freeze":
        trainer.model[2].requires_grad_(False)
    if how == "change_weights_and_finish":
        return outcome(trainer.optimizer.finish)
    if how == "step_alone":
        return outcome(trainer.optimizer.inner.step)
    if how == "count":
        return outcome(lambda: trainer.optimizer.count(8))
    return outcome(lambda: trainer.train(9))


def absent() -> str:
    """Rank 0 comes to an exchange, and the other one does not."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    trainer = Trainer(0, 3, process_group=group, codec=os.environ.get("CODEC"))
    result = "absent"
    if dist.get_rank() == 0:
        result = outcome(lambda: trainer.train(3))
    dist.barrier()
    return result


def finished_alone() -> str:
    """Rank 0 calls finish() between two exchanges, and the other one trains on; returns errors."""
    trainer = Trainer(0, 3, codec=os.environ["CODEC"])
    trainer.train(4)
    if dist.get_rank() == 0:
        return outcome(trainer.optimizer.finish)
    return outcome(lambda: trainer.train(3))


def in_ddp() -> str:
    """Trains a model in DistributedDataParallel, made before or after; returns the error."""
    model: nn.Module = make_model(0)
    if os.environ["DDP"] == "before":
        model = DistributedDataParallel(model)
    optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), every=3)
    if os.environ["DDP"] == "after":
        model = DistributedDataParallel(model)

    def train() -> None:
        loss_of(model, 0, 0).backward()
        optimizer.step()

    return outcome(train)


def thawed() -> str:
    """Lets a parameter train that was frozen first; returns the error."""
    model = make_model(0)
    model[3].bias.requires_grad_(False)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = LocalOptimizer(inner, every=3)
    model[3].bias.requires_grad_(True)
    loss_of(model, 0, 0).backward()
    return outcome(optimizer.step)


def uncounted() -> str:
    """Counts nothing on any worker, where that decides; returns the error."""
    _, _, step = one_weight(2, 0.5, weighted=True)
    step()
    return outcome(step)


def trained_on_and_on() -> str:
    """Trains until something ends the job; returns what."""
    trainer = Trainer(0, 3, weighted="WEIGHTED" in os.environ, codec=os.environ.get("CODEC"))
    return outcome(lambda: trainer.train(100_000))
