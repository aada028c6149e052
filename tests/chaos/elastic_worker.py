"""The training that elastic_chaos.py disturbs: a worker that writes down each step it commits."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
import thalweg.elastic

WIDTH = 256
BATCH = 32
DEVICE_SECONDS = 0.03  # of each step, in which a device would compute
_SAMPLES = 1 << 14


def _loss_of(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(samples) - samples.square().sum(1, keepdim=True)).square().mean()
    return loss


class _Log:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **entry: object) -> None:
        self._file.write(json.dumps({**entry, "at": time.monotonic()}) + "\n")


def train(log: Path, until: Path) -> None:
    """Trains until there is a file `until`; `log` gets a JSON object for each membership and each
    committed step, with the moment.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5)) / 16
    sampler = thalweg.elastic.Sampler(range(_SAMPLES), seed=1)
    state = thalweg.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    entries = _Log(log)
    state.on_change(lambda membership: entries.write(nodes=membership.nodes))
    is_over = torch.zeros(1)

    @thalweg.elastic.run
    def run(state: thalweg.elastic.State) -> None:
        ddp = DistributedDataParallel(model)
        thalweg.ddp.attach(ddp)
        while True:
            sampler.set_epoch(state.epoch)
            for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler):
                optimizer.zero_grad()
                loss = _loss_of(ddp, batch)
                loss.backward()
                time.sleep(DEVICE_SECONDS)
                optimizer.step()
                sampler.took(len(batch))
                state.commit()
                generation, world = state.membership.generation, state.membership.world_size
                weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
                digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
                step = {"step": state.commits, "generation": generation, "workers": world}
                entries.write(**step, digest=digest, loss=loss.item())
                is_over.fill_(until.exists())
                dist.broadcast(is_over, 0)
                if is_over:
                    return
            state.epoch += 1

    run(state)
