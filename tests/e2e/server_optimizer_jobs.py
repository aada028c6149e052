"""Contains jobs whose optimizer is on the shards: `server_optimizer_jobs.py NAME OUT`.

OPTIMIZER, a key of CASES, chooses what `trained` trains with; CODEC and PULL how it travels.
"""

import os
from collections.abc import Callable
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from jobs import digest, outcome
from server_optimizer_faults import broken
from server_optimizer_trainers import Trainer, make_model, on_servers, on_workers
from torch import nn

from thalweg.ps import ServerOptimizer

STEPS = 30


def trained() -> dict[str, Any]:
    """Trains with the optimizer on the servers, and on the workers; returns digests."""
    case = os.environ["OPTIMIZER"]
    passes = int(os.environ.get("PASSES", "1"))
    ours, theirs = on_servers(case), on_workers(case)
    before = digest(ours.model)
    ours.train(STEPS, passes)
    theirs.train(STEPS, passes)
    ours.model.state_dict()  # with overlap, the last weights may still be on their way
    return {
        "before": before,
        "servers": digest(ours.model),
        "workers": digest(theirs.model.module),
        "norms": [float(getattr(each.optimizer, "grad_norm", 0) or 0) for each in (ours, theirs)],
        "skipped": [each.skipped for each in (ours, theirs)],
    }


def exchanged_checkpoints() -> dict[str, Any]:
    """Takes a checkpoint of each kind of optimizer half-way, and goes on from it with the other."""
    case, half = os.environ["OPTIMIZER"], STEPS // 2
    whole, first, second = on_workers(case), on_servers(case), on_workers(case)
    whole.train(2 * half)
    first.train(half)
    second.train(half)
    to_workers, to_servers = on_workers(case), on_servers(case)
    _go_on(first, to_workers, half)
    _go_on(second, to_servers, half)
    return {
        "whole": digest(whole.model.module),
        "servers then workers": digest(to_workers.model.module),
        "workers then servers": digest(to_servers.model),
    }


def _go_on(before: Trainer, after: Trainer, steps: int) -> None:
    plain = getattr(before.model, "module", before.model)
    # Either order must do: the optimizer's state first on one side, the model's on the other.
    if isinstance(after.optimizer, ServerOptimizer):
        after.optimizer.load_state_dict(before.optimizer.state_dict())
    getattr(after.model, "module", after.model).load_state_dict(plain.state_dict())
    if not isinstance(after.optimizer, ServerOptimizer):
        after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.scheduler.load_state_dict(before.scheduler.state_dict())
    after.step = before.step
    after.train(steps)


def rounded_weights() -> dict[str, Any]:
    """Trains a model in bfloat16, or with weights that come so; compares it with the shards'."""
    model = make_model(0)
    if os.environ["PULL"] == "own":
        model = model.bfloat16()
    pull = "bf16" if os.environ["PULL"] == "bf16" else None
    optimizer = ServerOptimizer(model.named_parameters(), "adamw", lr=1e-2, pull=pull)
    for step in range(5):
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 64, generator=data).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
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


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors."""
    layer = nn.Linear(3, 3)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    optimizer = ServerOptimizer(layer.parameters(), "sgd")

    def make(module: nn.Module, kind: str = "adam", **options: Any) -> str:
        return outcome(lambda: ServerOptimizer(module.parameters(), kind, **options))

    return [
        make(layer, "lamb"),
        make(layer, amsgrad=True),
        make(layer, pull="int8"),
        make(layer, codec="int8"),
        make(layer, momentum=0.9),
        make(nn.Linear(3, 3).double()),
        make(nn.Linear(3, 3).half(), pull="bf16"),
        make(nn.Linear(3, 3 + dist.get_rank())),
        outcome(lambda: optimizer.add_param_group({"params": list(frozen.parameters())})),
        make(frozen),
    ]


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
        rounded_weights,
        refused,
        broken,
        changed_and_published,
        trained_on_and_on,
    )
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name](), "gloo")


if __name__ == "__main__":
    main()
