"""Contains jobs whose workers step by themselves and exchange by quorum: `quorum_jobs.py NAME OUT`.

QUORUM, GRACE and LATE choose how. Every worker records what it pushes, and which weights it gets
for that, in the folder RECORDS. The store of the process group keeps the workers apart: nobody
sleeps.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from apart_jobs import make_model, save, store
from digests import digest
from endings import is_over
from jobs import outcome
from torch import nn

from thalweg._job import _member
from thalweg.ps import LocalOptimizer

EXCHANGES = int(os.environ.get("EXCHANGES", "20"))
OUTER: dict[str, Any] = {"lr": 0.5, "momentum": 0.5}


class Trainer:
    """Takes steps on data that depend on the rank and the step alone, and records exchanges."""

    def __init__(self, every: int = 2, **options: Any) -> None:
        self.model = make_model()
        self.every = every
        self.step = self.exchange = 0
        inner = torch.optim.SGD(self.model.named_parameters(), lr=0.05)
        grace = os.environ.get("GRACE", "0")
        quorum = {
            "quorum": int(os.environ.get("QUORUM", "2")),
            "grace": None if grace == "measured" else float(grace),
            "late": os.environ.get("LATE", "keep"),
            "outer": {"name": "sgd"} | OUTER,
        }
        self.optimizer = LocalOptimizer(
            inner, every=every, bucket_cap_mb=0.05, **(quorum | options)
        )
        self._record()

    def train(self, exchanges: int) -> None:
        for _ in range(exchanges * self.every):
            self.step += 1
            data = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64, generator=data)).square().mean().backward()
            self.optimizer.step()

    def _record(self) -> None:
        """Saves what the only fragment pushes, and then gets, by the number of the exchange."""
        [fragment] = self.optimizer._exchange._fragments
        names = [[p.name for p in bucket.parameters] for bucket in fragment.buckets]
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        save("begin", {"buckets": names, "weights": weights})
        leave, arrive = fragment.leave, fragment.arrive

        def memory() -> dict[str, torch.Tensor]:
            return {
                each.name: view.clone()
                for bucket in fragment.buckets
                for each, view in zip(bucket.parameters, bucket._weights(), strict=True)
            }

        def leave_and_save(*arguments: Any) -> None:
            leave(*arguments)
            self.exchange += 1
            for name, pushed in memory().items():
                save(f"pushed{self.exchange}.{name}", pushed)

        def arrive_and_save() -> None:
            is_coming = any(bucket.is_coming for bucket in fragment.buckets)
            arrive()
            if is_coming:
                save(f"got{self.exchange}", memory())

        vars(fragment).update(leave=leave_and_save, arrive=arrive_and_save)


def slow_one() -> dict[str, Any]:
    """The last rank makes one exchange while the first makes LAG, neither fewer nor more."""
    trainer, lag = Trainer(), int(os.environ["LAG"])
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    for exchange in range(1, (EXCHANGES // lag if is_last else EXCHANGES) + 1):
        if is_last:
            store().wait([f"ended{exchange * lag}"])
        elif exchange > lag and exchange % lag == 0:
            store().wait([f"slow_ended{exchange // lag - 1}"])
        trainer.train(1)
        if is_first or is_last:
            store().set(f"{'ended' if is_first else 'slow_ended'}{exchange}", "")
    before = trainer.exchange
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model), "exchanges": before}


def at_will() -> dict[str, Any]:
    """All exchange as fast as they can, rank R by R + 1 exchanges more than EXCHANGES, or until
    there is a file UNTIL.
    """
    trainer = Trainer()
    while not is_over(trainer.exchange, EXCHANGES + dist.get_rank() + 1):
        trainer.train(1)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model)}


def streams() -> dict[str, Any]:
    """As `at_will`, with weights that travel meanwhile."""
    trainer = Trainer(every=6, delay=3, mix=0.25)
    trainer.train(EXCHANGES + dist.get_rank() + 1)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model)}


def goes_on() -> dict[str, Any]:
    """Trains, changes weights by hand and takes a checkpoint half-way, and goes on."""
    trainer, rank = Trainer(), dist.get_rank()
    trainer.train(EXCHANGES + rank)
    with torch.no_grad():
        trainer.model[0].bias.add_(1.0)
    trainer.optimizer.publish()  # while others may still be training
    trainer.train(1)
    trainer.optimizer.finish()
    saved, model = trainer.optimizer.state_dict(), copy.deepcopy(trainer.model.state_dict())
    bias, before = float(trainer.model[0].bias.mean()), digest(trainer.model)
    trainer.train(2 + rank)
    trainer.model.load_state_dict(model)
    trainer.optimizer.load_state_dict(saved)
    loaded = digest(trainer.model)
    trainer.train(1)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model), "bias": bias, "before": before, "loaded": loaded}


def resumes() -> dict[str, Any]:
    """Each goes on from a checkpoint of its own, some while weights are on their way to them."""
    trainer = Trainer(every=6, delay=3, quorum=1)
    for _ in range(EXCHANGES + dist.get_rank()):
        trainer.train(1)
    trainer.every = 1
    trainer.train(2 * dist.get_rank())  # steps, of which an exchange takes six
    saved, model = trainer.optimizer.state_dict(), copy.deepcopy(trainer.model.state_dict())
    due = saved["local"]["fragments"][0]["due"]
    trainer.optimizer.load_state_dict(copy.deepcopy(saved))
    trainer.model.load_state_dict(model)
    trainer.train(2)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model), "due": due}


def leaves() -> Any:
    """The last rank leaves in the middle without a word; the others go on."""
    trainer = Trainer()
    trainer.train(EXCHANGES)
    if dist.get_rank() == dist.get_world_size() - 1:
        trainer.optimizer.close()
        return "left"
    trainer.train(EXCHANGES)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model)}


def loses_one() -> dict[str, Any]:
    """The last rank dies in the middle; the others go on, even when it is back in an elastic
    training.
    """
    trainer = Trainer(min_nodes=2)
    trainer.train(EXCHANGES)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    trainer.train(EXCHANGES // 2)
    _member.abort_for_lost()
    trainer.train(EXCHANGES // 2)
    trainer.optimizer.finish()
    return {"digest": digest(trainer.model)}


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors."""
    layer = nn.Linear(3, 3)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)

    def make(**options: Any) -> str:
        return outcome(lambda: LocalOptimizer(inner, every=2, **options))

    return [
        make(quorum=0),
        make(quorum=3),
        make(quorum=2, grace=-1.0),
        make(quorum=2, late="never"),
        make(grace=1.0),
        make(late="drop"),
        make(quorum=2, weighted=True),
        make(quorum=2, fragments=2),
        make(quorum=2, codec="int8:start=0"),
        make(quorum=2, codec="sparse:0.02"),
        make(min_nodes=1),
        make(quorum=2, min_nodes=1, local_shards="0"),
        make(quorum=dist.get_rank() + 1),
    ]


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (slow_one, at_will, streams, goes_on, resumes, leaves, loses_one, refused)
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
