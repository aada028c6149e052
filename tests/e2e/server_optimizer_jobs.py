"""Contains jobs whose optimizer is on the shards: `server_optimizer_jobs.py NAME OUT`.

OPTIMIZER, a key of CASES, chooses what `trained` trains with; CODEC and PULL how it travels.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import job_runner
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digest
from jobs import outcome
from server_optimizer_every_way import go_on, trained_every_way
from server_optimizer_faults import broken, left_early, misused, two_scalers
from server_optimizer_trainers import Trainer, make_model, on_servers, on_workers
from torch import nn

from thalweg.ps import ServerOptimizer
from thalweg.ps._parameters import served

STEPS = int(os.environ.get("STEPS", "30"))


def trained() -> dict[str, Any]:
    """Trains with the optimizer on the servers, and as long on the workers; returns digests."""
    case = os.environ["OPTIMIZER"]
    passes = int(os.environ.get("PASSES", "1"))
    ours, theirs = on_servers(case), on_workers(case)
    before = digest(ours.model)
    ours.train_to_the_end(STEPS, passes)
    del ours.scaler  # the smallest scale of a process is taken for all of its gradients
    theirs.train(ours.step, passes)
    ours.model.state_dict()  # with overlap, the last weights may still be on their way
    return {
        "before": before,
        "servers": digest(ours.model),
        "workers": digest(theirs.model.module),
        "norms": [float(getattr(each.optimizer, "grad_norm", 0) or 0) for each in (ours, theirs)],
        "skipped": [each.skipped for each in (ours, theirs)],
        "waited": _served(ours).stats()["pull_wait_seconds"],
        "waited for": _served(ours).stats()["pull_wait_seconds_of"],
    }


def exchanged_checkpoints() -> dict[str, Any]:
    """Takes a checkpoint of each kind of optimizer half-way, and goes on from it with the other."""
    case, half = os.environ["OPTIMIZER"], STEPS // 2
    whole, first, second = on_workers(case), on_servers(case), on_workers(case)
    whole.train(2 * half)
    first.train(half)
    second.train(half)
    to_workers, to_servers = on_workers(case), on_servers(case)
    for before, after in ((first, to_workers), (second, to_servers)):
        go_on(before, after)
        after.train(half)
    return {
        "whole": digest(whole.model.module),
        "servers then workers": digest(to_workers.model.module),
        "workers then servers": digest(to_servers.model),
    }


def rounded_weights() -> dict[str, Any]:
    """Trains a model in bfloat16, or with weights that come so; compares it with the shards'."""
    model, optimizer = _rounded()
    for step in range(5):
        _rounded_step(model, optimizer, step)
    whole = optimizer.full_state_dict() if dist.get_rank() == 0 else {}  # alone
    dist.barrier()
    mine = dict(model.named_parameters())
    return {
        "digest": digest(model),
        "rounded": all(
            torch.equal(weights.bfloat16().float(), mine[name].float())
            for name, weights in whole.items()
        ),
        "differ": any(not torch.equal(w, mine[n].float()) for n, w in whole.items()),
        "names": sorted(whole),
    }


def _rounded_step(model: nn.Module, optimizer: ServerOptimizer, step: int) -> None:
    data = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(8, 64, generator=data).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def _rounded() -> tuple[nn.Module, ServerOptimizer]:
    """Returns a model in bfloat16, or one whose weights come so."""
    model = make_model(0)
    if os.environ["PULL"] == "own":
        model = model.bfloat16()
    pull = os.environ["PULL"] if os.environ["PULL"] != "own" else None
    return model, ServerOptimizer(model.named_parameters(), "adamw", lr=1e-2, pull=pull)


def followed() -> dict[str, Any]:
    """Trains with weights that come as differences. Says what the last difference was of, and what
    it has left out: the largest element of each, and the norm.
    """
    trainer = on_servers("sgd")
    optimizer = _served(trainer)

    def mine() -> torch.Tensor:
        optimizer.wait()
        return torch.cat([one.tensor.detach().flatten() for one in served(optimizer.param_groups)])

    trainer.train(19)
    before = mine().clone()
    trainer.train(1)
    weights = optimizer.full_state_dict()
    names = [one.name for one in served(optimizer.param_groups)]
    whole = torch.cat([weights[name].flatten() for name in names]).double()
    changed, left = whole - before, whole - mine()
    return {
        "digest": digest(trainer.model),
        "changed": (float(changed.abs().max()), float(changed.norm())),
        "left": (float(left.abs().max()), float(left.norm())),
        "largest": float(whole.abs().max()),
    }


def kept_weights() -> dict[str, Any]:
    """Trains on after publish(), and from checkpoints with and without the float32 weights."""
    whole, published, restored, rounded = (_rounded() for _ in range(4))
    for model, optimizer in (whole, published):
        for step in range(3):
            _rounded_step(model, optimizer, step)
    model, optimizer = whole
    saved = model.state_dict(), optimizer.state_dict(), optimizer.full_state_dict()
    published[1].publish()
    for model, optimizer in (restored, rounded):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    part = {name: values for name, values in saved[2].items() if name != "3.bias"}
    error = outcome(lambda: restored[1].load_full_state_dict(part))
    restored[1].load_full_state_dict(saved[2])
    for model, optimizer in (whole, published, restored, rounded):
        for step in range(3, 6):
            _rounded_step(model, optimizer, step)
    names = ("whole", "published", "restored", "rounded")
    digests = (digest(model) for model, _ in (whole, published, restored, rounded))
    return dict(zip(names, digests, strict=True)) | {"part": error}


def absent() -> str:
    """Rank 0 trains, and the other one does not."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    layer = nn.Linear(3, 3)
    optimizer = ServerOptimizer(layer.parameters(), "sgd", process_group=group)
    result = "absent"
    if dist.get_rank() == 0:
        layer(torch.ones(3)).sum().backward()
        result = outcome(optimizer.step)
    dist.barrier()
    return result


def too_large() -> str:
    """Trains 8 million weights, which with AdamW's moments take 96 MB; returns the error."""
    layer = nn.Linear(4000, 2000)

    def train() -> None:
        optimizer = ServerOptimizer(layer.parameters(), "adamw")
        layer(torch.ones(4000)).sum().backward()
        optimizer.step()

    return outcome(train)


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors."""
    layer = nn.Linear(3, 3)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    optimizer = ServerOptimizer(layer.parameters(), "sgd")
    apart = [{"params": [layer.weight]}, {"params": [layer.bias], "max_grad_norm": 2.0}]

    def make(module: nn.Module, kind: str = "adam", **options: Any) -> str:
        return outcome(lambda: ServerOptimizer(module.parameters(), kind, **options))

    return [
        make(layer, "adagrad"),
        make(layer, amsgrad=True),
        make(layer, pull="topk"),
        make(layer, pull="int8", mode="async"),
        make(nn.Linear(3, 3).half(), pull="onebit"),
        make(layer, codec="powersgd:start=0"),
        make(layer, codec="int8:start=3"),
        make(layer, codec="topk", mode="async"),
        make(layer, codec="int8", find_unused_parameters=True),
        make(layer, codec="int8", snapshot_every=2),
        make(layer, pull="int8", snapshot_every=2),
        make(layer, snapshot_every=2, find_unused_parameters=True),
        make(layer, momentum=0.9),
        make(nn.Linear(3, 3).double()),
        make(nn.Linear(3, 3).half(), pull="bf16"),
        make(nn.Linear(3, 3 + dist.get_rank())),
        outcome(lambda: optimizer.add_param_group({"params": list(frozen.parameters())})),
        make(frozen),
        outcome(lambda: setattr(optimizer, "max_grad_norm", 1.0)),
        make(layer, "lamb", grad_averaging=False),
        outcome(lambda: ServerOptimizer(apart, "lamb")),
    ]


def sharded_checkpoints() -> dict[str, Any]:
    """Goes on from a checkpoint of which each worker has written a part, in a model of other
    weights; returns digests, and the names in the part.
    """
    case, half = os.environ["OPTIMIZER"], STEPS // 2
    whole, before = on_servers(case), on_servers(case)
    whole.train(2 * half)
    before.train(half)
    folder = os.environ["FOLDER"]
    dcp.save({"optimizer": _served(before).shards}, checkpoint_id=folder)
    after = on_servers(case)
    after.train(1)  # which is to be forgotten
    dcp.load({"optimizer": _served(after).shards}, checkpoint_id=folder)
    for buffer, saved in zip(after.model.buffers(), before.model.buffers(), strict=True):
        buffer.copy_(saved)
    loaded = digest(after.model) == digest(before.model)
    after.scheduler.load_state_dict(before.scheduler.state_dict())
    for group, saved in zip(
        after.optimizer.param_groups, before.optimizer.param_groups, strict=True
    ):
        group["lr"] = saved["lr"]
    after.step = before.step
    after.train(half)
    return {
        "loaded": loaded,
        "whole": digest(whole.model),
        "after": digest(after.model),
        "part": sorted(_served(before).shards.state_dict()),
    }


def _served(trainer: Trainer) -> ServerOptimizer:
    assert isinstance(trainer.optimizer, ServerOptimizer)
    return trainer.optimizer


def changed_and_published() -> dict[str, Any]:
    """Halves a weight by hand after two steps; returns digests of both kinds of optimizer."""
    ours, theirs = on_servers("adamw"), on_workers("adamw")
    for trainer in (ours, theirs):
        trainer.train(2)
        with torch.no_grad():
            getattr(trainer.model, "module", trainer.model)[2].weight.mul_(0.5)
        if isinstance(trainer.optimizer, ServerOptimizer):
            trainer.optimizer.publish()
        trainer.train(2)
    return {
        "before": "",
        "servers": digest(ours.model),
        "workers": digest(theirs.model.module),
    }


def trained_on_and_on() -> str:
    """Trains until something ends the job; returns what."""
    trainer = on_servers("adamw")
    return outcome(lambda: trainer.train(100_000))


JOBS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        trained,
        exchanged_checkpoints,
        trained_every_way,
        sharded_checkpoints,
        rounded_weights,
        refused,
        broken,
        left_early,
        misused,
        two_scalers,
        changed_and_published,
        trained_on_and_on,
        followed,
        kept_weights,
        absent,
        too_large,
    )
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
