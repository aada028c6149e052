"""The training that elastic_chaos.py disturbs: a worker that writes down each step it commits."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from waiting import pass_time

import thalweg.ddp
import thalweg.elastic
from thalweg.ps import LocalOptimizer

WIDTH = 256
BATCH = 32
DEVICE_SECONDS = 0.03  # of each step, in which a device would compute
_SAMPLES = 1 << 14


def _loss_of(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(samples) - samples.square().sum(1, keepdim=True)).square().mean()
    return loss


class _Training:
    """One worker's. Its log gets a JSON object for each membership and each committed step."""

    def __init__(self, log: Path, until: Path) -> None:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._data = torch.randn(_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5)) / 16
        self._sampler = thalweg.elastic.Sampler(range(_SAMPLES), seed=1)
        self.state = thalweg.elastic.State(
            model=self.model, optimizer=self.optimizer, sampler=self._sampler, epoch=0, local=None
        )
        self._log = log.open("a", encoding="utf-8", buffering=1)
        self.state.on_change(lambda membership: self._write(nodes=membership.nodes))
        self._until = until
        self._is_over = torch.zeros(1)

    def batches(self) -> Iterator[torch.Tensor]:
        """Gives batches without end."""
        while True:
            self._sampler.set_epoch(self.state.epoch)
            loader = torch.utils.data.DataLoader(
                self._data, batch_size=BATCH, sampler=self._sampler
            )
            for batch in loader:
                self._sampler.took(len(batch))  # as soon as the step is committed
                yield batch
            self.state.epoch += 1

    def step(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
    ) -> float:
        """Returns the loss."""
        optimizer.zero_grad()
        loss = _loss_of(model, batch)
        loss.backward()
        pass_time(DEVICE_SECONDS)
        optimizer.step()
        return loss.item()

    def commit(self, loss: float, *, together: bool = True) -> bool:
        """Returns whether this worker ends now: all do at the same step, if they are together."""
        try:
            self.state.commit()
        finally:  # where nodes have come it raises, after the commit
            self._note(loss, is_digested=together)
        if not together:
            return self._until.exists()
        self._is_over.fill_(self._until.exists())
        dist.broadcast(self._is_over, 0)
        return bool(self._is_over)

    def _note(self, loss: float, *, is_digested: bool) -> None:
        membership = self.state.membership
        assert membership is not None
        self._write(
            step=self.state.commits,
            generation=membership.generation,
            workers=membership.world_size,
            digest=self._digest() if is_digested else "",
            loss=loss,
        )

    def end(self) -> None:
        """Writes down the last weights, which are the same on all."""
        self._write(end=self._digest())

    def _digest(self) -> str:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy()
        return hashlib.sha256(weights.tobytes()).hexdigest()[:16]

    def _write(self, **entry: object) -> None:
        self._log.write(json.dumps({**entry, "at": time.monotonic()}) + "\n")


def train(log: Path, until: Path, every: int, by_quorum: bool) -> None:
    """Trains until there is a file `until`; with local updates that are exchanged and committed
    after `every` steps, unless that is 0, and then by a quorum of the members if that is so.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    training = _Training(log, until)

    backend = "gloo" if by_quorum else "thalweg"  # that of Thalweg needs all members

    @thalweg.elastic.run
    def run(state: thalweg.elastic.State) -> None:
        ddp = DistributedDataParallel(training.model)
        thalweg.ddp.attach(ddp)
        for batch in training.batches():
            if training.commit(training.step(ddp, training.optimizer, batch)):
                training.end()
                return

    @thalweg.elastic.run(backend=backend)
    def run_local(state: thalweg.elastic.State) -> None:
        assert state.membership is not None
        quorum = len(state.membership.nodes) // 2 + 1 if by_quorum else None
        optimizer = LocalOptimizer(training.optimizer, every=every, quorum=quorum, min_nodes=quorum)
        if state.local is not None:
            optimizer.load_state_dict(state.local)
        for number, batch in enumerate(training.batches(), start=1):
            loss = training.step(training.model, optimizer, batch)
            if number % every:
                continue
            state.local = optimizer.state_dict()
            if training.commit(loss, together=not by_quorum):
                optimizer.finish()
                training.end()
                optimizer.close()
                return

    (run_local if every else run)(training.state)
