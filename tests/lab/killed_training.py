"""Trains with a checkpoint every few steps; in each of its first attempts, one rank is killed.

All gradients are exact in fp32, so that a run that loses or repeats a step ends with other weights.
Every line that rank 0 prints is JSON: the step from which an attempt begins, each step that is done
and, at the end, the weights. The script does not mention Thalweg.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path

import exact_training
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# A rank dies at one of these moments; in the first two, its attempt has saved a checkpoint.
MOMENTS = ("after a step", "in backward", "while saving", "before the first step")


def steps(kills: int, every: int) -> int:
    """Returns the steps of a whole training with a checkpoint every so many steps. None of its
    kills comes in or after the last step, when another rank may have ended well already.
    """
    return every * (kills // 2 + 3)


def expected_weight(kills: int, every: int, world: int) -> float:
    """Returns the value of every weight after a training without kills."""
    gradient = exact_training.gradient
    total = sum(
        gradient(rank, world, step) for step in range(steps(kills, every)) for rank in range(world)
    )
    return -exact_training.RATE * total / world


class Death:
    """Kills a rank at one moment of this attempt, in a way that no program can catch."""

    def __init__(self, folder: Path, kills: int) -> None:
        """All ranks call it together, because they must agree on how many have died."""
        died = [len(list(folder.glob("died-*")))]
        dist.broadcast_object_list(died)
        number = died[0]
        self._note = folder / f"died-{number}"
        self._moment = MOMENTS[number % len(MOMENTS)] if number < kills else ""
        saves = self._moment == "while saving"  # as rank 0 does
        rank = 0 if saves else (number + number // len(MOMENTS) + 1) % dist.get_world_size()
        self._is_mine = dist.get_rank() == rank

    def may_come(self, moment: str) -> None:
        if self._is_mine and moment == self._moment:
            self._note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def say(**what: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def train(folder: Path, kills: int, every: int) -> None:
    checkpoint, death = folder / "checkpoint.pt", Death(folder, kills)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(exact_training.INPUTS, exact_training.OUTPUTS, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=exact_training.RATE)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    say(begins=begin)
    dist.barrier()  # it is said before somebody dies
    death.may_come("before the first step")
    for step in range(begin, steps(kills, every)):
        own = step - begin + 1  # steps of this attempt
        optimizer.zero_grad()
        gradient = exact_training.gradient(rank, world, step)
        loss = ddp(torch.full((1, exact_training.INPUTS), gradient)).sum()
        if own == every + 2:
            loss.register_hook(lambda _: death.may_come("in backward"))
        loss.backward()
        optimizer.step()
        say(done=step + 1)
        if own == every + 1:
            death.may_come("after a step")
        if (step + 1) % every == 0 and rank == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step + 1}, folder / "unfinished.pt")
            death.may_come("while saving")
            (folder / "unfinished.pt").replace(checkpoint)
    say(values=sorted({float(value) for value in model.weight.detach().ravel()}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(os.environ["TMPDIR"]), int(os.environ["KILLS"]), int(os.environ["EVERY"]))
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()
