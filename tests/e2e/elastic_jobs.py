"""Contains an elastic training: `elastic_jobs.py LOG` appends to LOG, a JSON value a line, its
memberships and steps; it goes on until there is a file UNTIL.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
import thalweg.elastic
from thalweg._job import _member
from thalweg.elastic import _mailbox

SAMPLES = 96
BATCH = 4
RATE = 0.05


def inputs() -> torch.Tensor:
    return torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def loss_of(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
    return loss


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Log:
    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, **entry: Any) -> None:
        with Path(self._path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def steps_of(
    state: thalweg.elastic.State, sampler: thalweg.elastic.Sampler, log: Log
) -> Iterator[tuple[dict[str, int], list[int]]]:
    """Yields what names a step, and its samples, epoch for epoch without end."""
    while True:
        sampler.set_epoch(state.epoch)
        indices = list(sampler)
        for at in range(0, len(indices), BATCH):
            part = indices[at : at + BATCH]
            step = {"step": state.commits + 1, "generation": state.membership.generation}
            log.write(**step, samples=part)
            yield step, part
        state.epoch += 1


def wait_for_slow_answers() -> None:
    """Lets a node wait for the others' answers for as long as a busy machine delays them; who is
    killed still refuses connections at once.
    """
    _mailbox._ANSWER_SECONDS = 10.0


def die_while_it_begins(where: str) -> None:
    """Lets this process end in its first membership: before its nodes meet, or when they have met
    and connect to the shards.
    """
    if where == "meets":
        dist.init_process_group = lambda *_, **__: os._exit(9)
    elif where == "connects":
        _member._connect = lambda *_: os._exit(9)


def main() -> None:
    wait_for_slow_answers()
    die_while_it_begins(os.environ.get("DIES_WHEN_IT", ""))
    log = Log(sys.argv[1])
    torch.set_num_threads(1)
    model, optimizer = make()
    data = inputs()
    sampler = thalweg.elastic.Sampler(range(SAMPLES), seed=1)
    state = thalweg.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.on_change(lambda membership: log.write(membership=membership, commits=state.commits))
    is_over = torch.zeros(1)
    fails_at = int(os.environ.get("FAILS_AT", "-1"))

    @thalweg.elastic.run
    def train(state: thalweg.elastic.State) -> list[float]:
        ddp = DistributedDataParallel(model)
        thalweg.ddp.attach(ddp, codec=os.environ.get("CODEC"))
        for step, part in steps_of(state, sampler, log):
            optimizer.zero_grad()
            loss_of(ddp, data[part]).backward()
            if state.commits == fails_at:
                raise RuntimeError("the script's own fault")
            optimizer.step()
            sampler.took(len(part))
            log.write(**step, digest=digest(model))
            state.commit()
            is_over.fill_(Path(os.environ["UNTIL"]).exists())
            dist.broadcast(is_over, 0)
            if is_over:
                return weights_of(model).tolist()
        raise AssertionError("steps do not end")

    log.write(result=train(state))


if __name__ == "__main__":
    main()
