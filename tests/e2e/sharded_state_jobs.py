"""Contains jobs that shard optimizer state and checkpoints: `sharded_state_jobs.py NAME OUT`.

FOLDER is where checkpoints lie. KIND is "fsdp1" or "fsdp2".
"""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsdp1_cases
import fsdp2_cases
import fsdp_models as models
import job_runner
import torch.distributed as dist
from digests import digest
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD

WIDTH = 9  # which neither 2 nor 4 divides
OPTIONS: dict[type[Optimizer], dict[str, float]] = {
    FusedAdam: {"lr": 0.01},
    FusedAdamW: {"lr": 0.01, "weight_decay": 0.1},
    FusedSGD: {"lr": 0.05, "momentum": 0.9},
}


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    source = models.batches()
    for _ in range(steps):
        optimizer.zero_grad()
        models.loss_of(model, next(source)).backward()
        optimizer.step()


def zero_redundancy() -> dict[str, Any]:
    """Trains with fused optimizers, each worker keeping a part of the state, and beside that with
    whole ones; also on Gloo.

    Returns, by optimizer, digests of parameters, of the consolidated state (on rank 0) and of the
    whole state, and how many parameters this worker keeps the state of.
    """
    gloo = dist.new_group(backend="gloo")
    return {kind.__name__: _zero(kind, options, gloo) for kind, options in OPTIONS.items()}


def _zero(kind: type[Optimizer], options: dict[str, float], gloo: Any) -> dict[str, Any]:
    def run(group: Any, wrap: Callable[[Any], Any]) -> tuple[str, Any]:
        model = DistributedDataParallel(models.build(WIDTH), process_group=group)
        optimizer = wrap(model.parameters())
        train(model, optimizer, 4)
        return digest([p.detach() for p in model.parameters()]), optimizer

    def sharded(group: Any) -> Callable[[Any], Any]:
        return lambda parameters: ZeroRedundancyOptimizer(
            parameters, optimizer_class=kind, process_group=group, **options
        )

    ours, zero = run(dist.group.WORLD, sharded(dist.group.WORLD))
    kept = sum(len(state) > 0 for state in zero.optim.state.values())
    theirs, _ = run(gloo, sharded(gloo))
    whole, optimizer = run(dist.group.WORLD, lambda parameters: kind(parameters, **options))
    zero.consolidate_state_dict(to=0)
    state = zero.state_dict() if dist.get_rank() == 0 else {"state": {}}
    return {
        "ours": ours,
        "theirs": theirs,
        "whole": whole,
        "kept": kept,
        "of": len(optimizer.state),
        "consolidated": digest(state["state"]),
        "whole state": digest(optimizer.state_dict()["state"]),
    }


def resharded() -> dict[str, Any]:
    """Goes on from the checkpoint in FOLDER, if there is one: loads it, takes two steps, saves it.

    Returns digests of model and optimizer after loading and before saving.
    """
    folder = Path(os.environ["FOLDER"])
    groups = fsdp1_cases.Groups.of("thalweg")
    is_first = os.environ["KIND"] == "fsdp1"
    model = fsdp1_cases.shard(groups.world, WIDTH) if is_first else fsdp2_cases.shard(groups, WIDTH)
    optimizer = FusedAdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    untrained = _digest_of(model, optimizer)
    loaded = ""
    if folder.exists():
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(parts, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        loaded = _digest_of(model, optimizer)
    train(model, optimizer, 2)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(parts, checkpoint_id=folder)
    return {
        "untrained": untrained,
        "loaded": loaded,
        "saved": _digest_of(model, optimizer),
        "shard": digest([models.local(p) for p in model.parameters()]),
    }


def _digest_of(model: nn.Module, optimizer: Optimizer) -> str:
    """Returns the digest of the whole model and optimizer state, the same on all workers."""
    return digest(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


JOBS = {job.__name__: job for job in (zero_redundancy, resharded)}


def main() -> None:
    job_runner.run(lambda name: JOBS[name](), "thalweg", timedelta(seconds=60))


if __name__ == "__main__":
    main()
