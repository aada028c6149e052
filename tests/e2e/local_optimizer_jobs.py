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
from diloco import DiLoCo, Settings
from jobs import digest, outcome
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import thalweg.amp
import thalweg.ddp
from thalweg.compat._apex_optimizers import FusedAdam
from thalweg.optim import FusedAdamW, FusedSGD
from thalweg.ps import LocalOptimizer

# How a model with parts of 64 x 100, 100 x 100 and 100 x 10 weights is exchanged: by name, the
# arguments of LocalOptimizer and what they mean. The largest parameter is the first fragment, and
# those that follow fill up the second one.
_HALVES = [["2.weight"], ["0.weight", "0.bias", "2.bias", "3.weight", "3.bias"]]
CASES: dict[str, tuple[dict[str, Any], Settings]] = {
    "plain": ({}, Settings(5)),
    "fragments": ({"fragments": 2}, Settings(5, (2, 5), _HALVES)),
    "delayed": ({"delay": 2, "mix": 0.25}, Settings(5, delay=2, mix=0.25)),
    "streaming": (
        {"fragments": 2, "delay": 3, "mix": 0.5},
        Settings(5, (2, 5), _HALVES, delay=3, mix=0.5),
    ),
    # Powers of two, so that workers and reference multiply differences by the same.
    "weighted": ({"weighted": True}, Settings(5, shares=(0.25, 0.75))),
    "rounded": ({"pull": "bf16"}, Settings(5, pull=torch.bfloat16)),
}
STEPS = int(os.environ.get("STEPS", "23"))


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 10))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    data = torch.Generator().manual_seed(1000 * step + rank)
    inputs, wanted = (torch.randn(8, size, generator=data) for size in (64, 10))
    return functional.mse_loss(model(inputs), wanted)


class Trainer:
    """A worker, whose learning rate falls."""

    def __init__(self, seed: int, every: int, **options: Any) -> None:
        self.model = make_model(seed)
        inner = FusedAdamW(self.model.named_parameters(), lr=1e-2)
        self.optimizer = LocalOptimizer(inner, every=every, bucket_cap_mb=0.02, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.9)
        self.work = 1.0 + 2 * dist.get_rank() if options.get("weighted") else 0.0
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, dist.get_rank(), self.step).backward()
            if self.work:
                self.optimizer.count(self.work)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1


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
    outer = FusedSGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    theirs = DiLoCo(settings, workers, inner, whole, outer, loss_of)
    for _ in range(STEPS):
        theirs.train(1)
        for scheduler in schedulers:
            scheduler.step()
    names = dict(whole.named_parameters())
    return {
        "before": before,
        "workers": digest(ours.model),
        "diloco": digest(workers[dist.get_rank()]),
        "whole": all(
            torch.equal(weights, names[name])
            for name, weights in ours.optimizer.full_state_dict().items()
        ),
    }


def _through_a_file(saved: Any) -> Any:
    """Returns what a file keeps: rank 0's on all workers if WHOSE says so."""
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


def _one_weight(every: int, inner_lr: float, target: float = 0.0, **options: Any) -> Any:
    """Returns a weight that begins with 1, and a function that does a step towards the target."""
    weight = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([weight], lr=inner_lr)
    optimizer = LocalOptimizer(inner, every=every, **options)

    def step(work: float = 0.0) -> float:
        optimizer.zero_grad()
        (weight - target).square().div(2).sum().backward()
        if work:
            optimizer.count(work)
        optimizer.step()
        return weight.item()

    return weight, optimizer, step


def series() -> dict[str, list[float]]:
    """Trains models of one weight; returns it after each step."""
    rank = dist.get_rank()
    mean = {"name": "sgd"}
    _, _, plain = _one_weight(2, 0.3, outer=mean)
    _, _, nesterov = _one_weight(2, 0.3, outer={"name": "nesterov", "lr": 0.7, "momentum": 0.9})
    _, _, delayed = _one_weight(4, 0.5, outer=mean, delay=1, mix=0.5)
    _, _, weighted = _one_weight(2, 1.0, target=rank, outer=mean, weighted=True)
    return {
        "plain": [plain() for _ in range(4)],
        "nesterov": [nesterov() for _ in range(6)],
        "delayed": [delayed() for _ in range(9)],
        "weighted": [weighted(1.0 + 2 * rank) for _ in range(2)],
    }


def finished() -> dict[str, Any]:
    """Ends a training in the middle of an interval; returns weights of all kinds, and counters."""
    rank = dist.get_rank()
    weight, optimizer, step = _one_weight(10, 0.5, rank, outer={"name": "sgd"}, delay=2)
    own = [step() for _ in range(3)][-1]
    optimizer.finish()
    after = weight.item()
    optimizer.finish()  # nothing has changed since
    stats = optimizer.stats()
    return {"own": own, "after": after, "again": weight.item(), "stats": stats}


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
    weight, optimizer, step = _one_weight(2, 0.5, outer={"name": "sgd"})
    step()
    with torch.no_grad():
        weight.fill_(16.0 + dist.get_rank())
    optimizer.publish()
    return {"weights": [weight.item(), *(step() for _ in range(2))]}


def bytes_sent() -> dict[str, float]:
    """Returns what a node sends in a step: with gradients in each, and with every 50th's."""
    trainer = Trainer(0, 50)
    trainer.train(50)
    before = job_runner.sent_bytes()
    trainer.train(100)
    local = job_runner.sent_bytes() - before
    trainer.optimizer.close()
    model = DistributedDataParallel(make_model(0))
    thalweg.ddp.attach(model)
    before = job_runner.sent_bytes()
    for step in range(100):
        loss_of(model, dist.get_rank(), step).backward()
    return {"local": local / 100, "ddp": (job_runner.sent_bytes() - before) / 100}


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
        make(layer, codec="int8"),
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
    """Rank 0 does what BREAK says, in its second step; returns how the job ends."""
    trainer = Trainer(0, 3)
    trainer.train(1)
    how = os.environ["BREAK"]
    if dist.get_rank() != 0:
        return outcome(lambda: trainer.train(9))
    if how.startswith("change_weights"):
        with torch.no_grad():
            trainer.model[2].weight.mul_(0.5)
    if how == "change_weights_and_finish":
        return outcome(trainer.optimizer.finish)
    if how == "step_alone":
        return outcome(trainer.optimizer.inner.step)
    if how == "count":
        return outcome(lambda: trainer.optimizer.count(8))
    return outcome(lambda: trainer.train(9))


def in_ddp() -> str:
    """Trains a model in DistributedDataParallel; returns the error."""
    model = DistributedDataParallel(make_model(0))
    optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), every=3)
    loss_of(model, 0, 0).backward()
    return outcome(optimizer.step)


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
    _, _, step = _one_weight(2, 0.5, weighted=True)
    step()
    return outcome(step)


def trained_on_and_on() -> str:
    """Trains until something ends the job; returns what."""
    trainer = Trainer(0, 3, weighted="WEIGHTED" in os.environ)
    return outcome(lambda: trainer.train(100_000))


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        trained,
        resumed,
        halved,
        series,
        finished,
        averaged,
        skipped,
        published,
        bytes_sent,
        refused,
        broken,
        in_ddp,
        thawed,
        uncounted,
        trained_on_and_on,
    )
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name](), "gloo")


if __name__ == "__main__":
    main()
