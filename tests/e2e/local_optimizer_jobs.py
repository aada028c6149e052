"""Contains jobs whose workers step by themselves: `local_optimizer_jobs.py NAME OUT`.

CASE, a key of CASES, chooses how `trained` and `resumed` exchange.
"""

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from diloco import DiLoCo
from local_optimizer_bytes import bytes_of_exchange, bytes_sent
from local_optimizer_faults import (
    absent,
    broken,
    finished_alone,
    in_ddp,
    refused,
    thawed,
    trained_on_and_on,
    uncounted,
)
from local_optimizer_odds import hollow, mixed, poisoned, replanned
from local_optimizer_trainers import CASES, Trainer, loss_of, make_model, one_weight
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD
from thalweg.ps import LocalOptimizer

STEPS = int(os.environ.get("STEPS", "23"))


def trained() -> dict[str, Any]:
    """Trains with a LocalOptimizer, and in one process; returns digests."""
    options, settings = CASES[os.environ["CASE"]]
    ours = Trainer(dist.get_rank(), settings.every, **options)  # rank 0's parameters count
    before = digest(ours.model)
    ours.train(STEPS)
    workers = [make_model(0) for _ in range(dist.get_world_size())]
    inner = [FusedAdamW(worker.parameters(), lr=1e-2) for worker in workers]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 4, gamma=0.9) for each in inner]
    whole = make_model(0)
    theirs = DiLoCo(settings, workers, inner, whole, _outer(whole, options), loss_of)
    for _ in range(STEPS):
        theirs.train(1)
        for scheduler in schedulers:
            scheduler.step()
    names = dict(whole.named_parameters())
    result = {
        "before": before,
        "workers": digest(ours.model),
        "diloco": digest(workers[dist.get_rank()]),
        "whole": all(
            torch.equal(weights, names[name])
            for name, weights in ours.optimizer.full_state_dict().items()
        ),
    }
    ours.optimizer.finish()
    theirs.finish()
    return result | {
        "finished": digest(ours.model),
        "diloco finished": digest(workers[dist.get_rank()]),
    }


def _outer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    asked = options.get("outer", {"name": "nesterov"})
    if asked["name"] == "nesterov":
        return FusedSGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return {"adam": FusedAdam, "sgd": FusedSGD}[asked["name"]](model.parameters(), lr=asked["lr"])


def _through_a_file(saved: Any) -> Any:
    """Returns what a file keeps: rank 0's on all workers if WHOSE says so, or that of the workers
    of one node.
    """
    if os.environ.get("WHOSE") == "one node's" and dist.get_rank():
        saved["optimizer"]["local"]["codec"] = {}  # only a node's first worker has it
    file = io.BytesIO()
    torch.save(saved, file)
    kept = [file.getvalue()]
    if os.environ.get("WHOSE") == "rank 0's":
        dist.broadcast_object_list(kept)
    return torch.load(io.BytesIO(kept[0]))


def resumed() -> dict[str, Any]:
    """Goes on from a checkpoint of a step in the middle of an interval; returns digests."""
    options, settings = CASES[os.environ["CASE"]]
    first = Trainer(0, settings.every, **options)
    first.train(settings.every + 3)
    saved = _through_a_file(
        {
            "model": first.model.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "scheduler": first.scheduler.state_dict(),
        }
    )
    second = Trainer(1, settings.every, **options)
    if os.environ["FIRST"] == "model":
        second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    if os.environ["FIRST"] != "model":
        second.model.load_state_dict(saved["model"])
    second.scheduler.load_state_dict(saved["scheduler"])
    second.step = first.step
    for trainer in (first, second):
        trainer.train(9)
        trainer.optimizer.finish()
    return {
        "before": digest(make_model(1)),
        "whole": digest(first.model),
        "resumed": digest(second.model),
    }


def halved() -> dict[str, Any]:
    """Trains a model in bfloat16; returns whether it has the shards' weights at the end."""
    model = make_model(0).bfloat16()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = LocalOptimizer(inner, every=3, outer={"name": "sgd"})
    before = digest(model)
    for step in range(7):
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 64, generator=data).bfloat16()).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    whole, named = optimizer.full_state_dict(), dict(model.named_parameters())
    return {
        "before": before,
        "after": digest(model),
        "rounded": all(torch.equal(whole[name].bfloat16(), named[name]) for name in named),
        "differ": any(not torch.equal(whole[name], named[name].float()) for name in named),
    }


def series() -> dict[str, list[float]]:
    """Trains models of one weight; returns it after each step."""
    rank = dist.get_rank()
    mean = {"name": "sgd"}
    _, _, plain = one_weight(2, 0.3, outer=mean)
    _, _, nesterov = one_weight(2, 0.3, outer={"name": "nesterov", "lr": 0.7, "momentum": 0.9})
    _, _, delayed = one_weight(4, 0.5, outer=mean, delay=1, mix=0.5)
    _, _, weighted = one_weight(2, 1.0, target=rank, outer=mean, weighted=True)
    return {
        "plain": [plain() for _ in range(4)],
        "nesterov": [nesterov() for _ in range(6)],
        "delayed": [delayed() for _ in range(9)],
        "weighted": [weighted(1.0 + 2 * rank) for _ in range(2)],
    }


def finished() -> dict[str, Any]:
    """Ends a training in the middle of an interval; returns weights of all kinds, and counters."""
    rank = dist.get_rank()
    weight, optimizer, step = one_weight(10, 0.5, rank, outer={"name": "sgd"}, delay=2)
    own = [step() for _ in range(3)][-1]
    optimizer.finish()
    after = weight.item()
    optimizer.finish()  # nothing has changed since
    stats = optimizer.stats()
    return {"own": own, "after": after, "again": weight.item(), "stats": stats}


def left_ddp() -> dict[str, Any]:
    """Trains in DistributedDataParallel first, and then by local updates; returns digests."""
    model = DistributedDataParallel(make_model(0))
    loss_of(model, dist.get_rank(), 0).backward()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.step()
    optimizer = LocalOptimizer(inner, every=2)
    seen = [digest(model.module)]
    for step in range(1, 3):
        optimizer.zero_grad()
        loss_of(model.module, dist.get_rank(), step).backward()
        optimizer.step()
        seen.append(digest(model.module))
    return {"seen": seen}


def averaged() -> dict[str, float]:
    """Takes 40 steps with the mean of the weights in every fourth, and with torch's local SGD;
    returns the largest weight, and by how much the weights differ and have moved.
    """
    begin = nn.Linear(8, 1, bias=False)
    for parameter in begin.parameters():
        dist.broadcast(parameter.data, 0)
    ours, theirs = copy.deepcopy(begin), copy.deepcopy(begin)
    inner = torch.optim.SGD(theirs.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=4, warmup_steps=3)
    pairs = [
        (
            ours,
            LocalOptimizer(
                torch.optim.SGD(ours.parameters(), lr=0.1), every=4, outer={"name": "sgd"}
            ),
        ),
        (theirs, PostLocalSGDOptimizer(inner, averager)),
    ]
    for step in range(40):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = functional.normalize(torch.randn(8, 8, generator=data))
        wanted = torch.rand(8, 1, generator=data)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            (model(inputs) - wanted).square().div(2).mean().backward()
            optimizer.step()
    a, b, c = ours.weight.detach(), theirs.weight.detach(), begin.weight.detach()
    return {
        "largest": max(float(each.abs().max()) for each in (a, b, c)),
        "differ": float((a - b).norm()),
        "moved": float((b - c).norm()),
    }


def skipped() -> dict[str, Any]:
    """Lets a GradScaler leave out a step of one worker only; returns the weight after each."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = LocalOptimizer(torch.optim.SGD([weight], lr=0.5), every=2, outer={"name": "sgd"})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss = weight.square().div(2).sum()
        loss = loss * float("inf") if (step, dist.get_rank()) == (1, 1) else loss
        scaler.scale(loss).backward()
        if step >= 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(weight.item())
    return {"weights": seen, "scale": scaler.get_scale()}


def published() -> dict[str, Any]:
    """Changes a weight by hand, differently on the workers, and publishes it."""
    weight, optimizer, step = one_weight(2, 0.5, outer={"name": "sgd"})
    step()
    with torch.no_grad():
        weight.fill_(16.0 + dist.get_rank())
    optimizer.publish()
    return {"weights": [weight.item(), *(step() for _ in range(2))]}


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        trained,
        resumed,
        halved,
        series,
        finished,
        left_ddp,
        averaged,
        skipped,
        published,
        hollow,
        mixed,
        poisoned,
        replanned,
        bytes_sent,
        bytes_of_exchange,
        refused,
        broken,
        absent,
        finished_alone,
        in_ddp,
        thawed,
        uncounted,
        trained_on_and_on,
    )
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
