"""Contains scripts that do what ServerOptimizer cannot bear."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import outcome
from server_optimizer_trainers import Trainer, on_servers, on_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.ps import ServerOptimizer


def _break(break_it: Callable[[Trainer], Any], rank: int = 0) -> str:
    """Returns how the job ends that one rank breaks in its second step, as this rank sees it."""
    trainer = on_servers("nesterov")
    trainer.train(1)
    if dist.get_rank() == rank:
        return outcome(lambda: break_it(trainer))
    return outcome(lambda: trainer.train(2))


def left_early() -> dict[str, Any]:
    """Lets rank 1 leave right after the last step, and rank 0 ask for the weights then; returns
    digests of its weights and of those of the optimizer on the workers.
    """
    ours, theirs = on_servers("adamw"), on_workers("adamw")
    theirs.train(6)
    ours.train(6)
    if dist.get_rank() == 1:
        ours.optimizer.close()
    dist.barrier()
    if dist.get_rank() == 1:
        return {}
    ours.model.state_dict()
    return {"servers": digest(ours.model), "workers": digest(theirs.model.module)}


def change_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model[2].weight.mul_(0.5)
    trainer.train(1)


def change_weights_late(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad()
    trainer.loss().backward()
    with torch.no_grad():
        trainer.model[2].weight.mul_(0.5)
    trainer.optimizer.step()


def replace_weights(trainer: Trainer) -> None:
    trainer.model[2].weight.data = trainer.model[2].weight.data * 0.5
    trainer.train(1)


def broken() -> str:
    """Does what BREAK says; returns the error."""

    def clip(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)

    def backward_twice(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.loss(1).backward()

    def backward_after_zero_grad(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.train(1)  # the step that is missing

    def change_settings(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.optimizer.param_groups[0]["lr"] *= 2
        trainer.optimizer.step()

    def leave_one_out(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.model[2](torch.ones(100)).sum().backward()
        trainer.optimizer.step()

    def scale(trainer: Trainer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        trainer.optimizer.zero_grad()
        scaler.scale(trainer.loss()).backward()

    def share_memory(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.model.share_memory()

    def use_weights_directly(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        hidden = trainer.model[1](trainer.model[0](torch.ones(64)))
        # torch itself notices a weight that changes before the backward pass, but not a summand.
        hidden = hidden + trainer.model[2].bias
        trainer.model[3](hidden).sum().backward()

    def other_settings(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[1]["lr"] = 0.75
        trainer.train(1)

    ways = (
        clip,
        backward_twice,
        backward_after_zero_grad,
        change_settings,
        change_weights,
        change_weights_late,
        replace_weights,
        leave_one_out,
        scale,
        share_memory,
        use_weights_directly,
        other_settings,
    )
    return _break({way.__name__: way for way in ways}[os.environ["BREAK"]])


def misused() -> str:
    """All workers do what MISUSE says; returns the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def step(optimizer: ServerOptimizer, model: nn.Module) -> None:
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()

    def unfreeze() -> None:
        model[0].requires_grad_(False)
        optimizer = ServerOptimizer(model.parameters(), "sgd", lr=0.1)
        step(optimizer, model)
        model[0].requires_grad_(True)
        step(optimizer, model)

    def share_parameters() -> None:
        former = ServerOptimizer(model.parameters(), "sgd", lr=0.1)
        step(former, model)
        later = ServerOptimizer(model.parameters(), "sgd", lr=0.1)
        step(later, model)

    def go_back_to_the_former() -> None:
        former = ServerOptimizer(model.parameters(), "sgd", lr=0.1)
        later = ServerOptimizer(model.parameters(), "sgd", lr=0.1)
        later.close()
        step(former, model)
        assert later.param_groups  # it is still there

    def sparse() -> None:
        words = nn.Embedding(4, 2, sparse=True)
        optimizer = ServerOptimizer(words.parameters(), "sgd", lr=0.1)
        words(torch.tensor([1])).sum().backward()
        optimizer.step()

    def load_head_alone() -> None:
        head = torch.optim.AdamW(model.parameters(), lr=0.1)
        model[1](torch.ones(3)).sum().backward()
        head.step()
        head.zero_grad()
        ServerOptimizer(model.parameters(), "adamw", lr=0.1).load_state_dict(head.state_dict())

    def in_ddp() -> None:
        step(
            ServerOptimizer(model.parameters(), "sgd", lr=0.1),
            DistributedDataParallel(model),
        )

    ways = (
        unfreeze,
        share_parameters,
        go_back_to_the_former,
        sparse,
        load_head_alone,
        in_ddp,
    )
    return outcome({way.__name__: way for way in ways}[os.environ["MISUSE"]])


def two_scalers() -> list[float]:
    """Trains two models, each with a scaler of its own scale; returns how far they are from those
    that torch trains.
    """
    torch.manual_seed(0)
    ours = [nn.Linear(4, 3), nn.Linear(4, 3)]
    torchs = copy.deepcopy(ours)

    def train(models: list[nn.Linear], optimizers: list[torch.optim.Optimizer]) -> None:
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0**10, 2.0**16)]
        for _ in range(3):
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(4)).square().sum()).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()

    train(ours, [ServerOptimizer(m.parameters(), "sgd", lr=0.1, loss_scaling=True) for m in ours])
    train(torchs, [torch.optim.SGD(m.parameters(), lr=0.1) for m in torchs])
    return [
        float((a.weight - b.weight).detach().abs().max()) for a, b in zip(ours, torchs, strict=True)
    ]
