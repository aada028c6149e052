"""Contains scripts that do what ServerOptimizer cannot bear."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jobs import outcome
from server_optimizer_trainers import Trainer, on_servers
from torch import nn


def _break(break_it: Callable[[Trainer], Any], rank: int = 0) -> str:
    """Returns how the job ends that one rank breaks in its second step, as this rank sees it."""
    trainer = on_servers("nesterov")
    trainer.train(1)
    if dist.get_rank() == rank:
        return outcome(lambda: break_it(trainer))
    return outcome(lambda: trainer.train(2))


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

    def change_weights(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.model[2].weight.mul_(0.5)
        trainer.train(1)

    def leave_one_out(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.model[2](torch.ones(100)).sum().backward()
        trainer.optimizer.step()

    def scale(trainer: Trainer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        trainer.optimizer.zero_grad()
        scaler.scale(trainer.loss()).backward()

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
        leave_one_out,
        scale,
        use_weights_directly,
        other_settings,
    )
    return _break({way.__name__: way for way in ways}[os.environ["BREAK"]])
