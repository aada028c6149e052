"""One of WORKERS workers: fused optimizers on what FullyShardedDataParallel (FSDP1) makes of
parameters; prints what it finds.

Usage: WORKERS=N optim_fsdp1_worker.py RANK STORE
"""

import copy
import functools
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD

RANK = int(sys.argv[1])
WORKERS = int(os.environ["WORKERS"])
CPU = torch.device("cpu")


def sharded(use_orig_params, strategy=ShardingStrategy.FULL_SHARD, made=None):
    """Returns a model of 16 weights, 8 on each of two ranks, or of what is `made`."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        made or nn.Linear(4, 4, bias=False),
        device_id=CPU,
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )


def overflow(kind, use_orig_params=True):
    """Trains with an infinity in rank 1's shard, in steps 0 and 2 of 4.

    Returns the scales after each step, which steps have changed weights, and how many count.
    """
    model = sharded(use_orig_params)
    optimizer = kind(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    scales, changed = [], []
    for step in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if RANK == 1 and step % 2 == 0:
            next(model.parameters()).grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = [p.detach() for p in model.parameters()]
        changed.append(not all(map(torch.equal, before, after)))
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return [scales, changed, counts]


def refusal(make, use_orig_params=True, dtype=torch.float32):
    """Returns what the first step of `make(parameters)` says, and whether weights have changed."""
    model = sharded(use_orig_params).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    text = said(make, model)
    return [text, not all(map(torch.equal, before, map(torch.detach, model.parameters())))]


def said(make, model):
    """Returns what a step of `make(parameters)` says."""
    optimizer = make(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def whole(make, strategy, *, use_orig_params, bias, dtype=torch.float32):
    """Returns what a step says of a model that each rank has all of, and whether it does what it
    does to the same model without FullyShardedDataParallel.
    """
    torch.manual_seed(1)
    plain = nn.Linear(4, 4, bias=bias)
    model = sharded(use_orig_params, strategy, copy.deepcopy(plain)).to(dtype)
    text = said(make, model)
    said(make, plain.to(dtype))
    ours, theirs = (
        torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, plain)
    )
    return [text, torch.equal(ours, theirs)]


def all_whole(strategy):
    """Returns what steps that need norms say and do where nothing is sharded."""
    lamb = functools.partial(FusedLAMB, weight_decay=0.1)
    clipping = functools.partial(FusedSGD, lr=1.0, max_grad_norm=1.0)
    return {
        "clipping": whole(clipping, strategy, use_orig_params=True, bias=True),
        "clipping, flat": whole(clipping, strategy, use_orig_params=False, bias=True),
        "LAMB": whole(lamb, strategy, use_orig_params=True, bias=True),
        "LAMB, flat": whole(lamb, strategy, use_orig_params=False, bias=False),
        "LAMB, float64": whole(
            lamb, strategy, use_orig_params=True, bias=True, dtype=torch.float64
        ),
    }


def vectors(strategy, size=4, *, use_orig_params=True):
    """Returns what a step that clips says of a unit that has only vectors."""
    model = sharded(use_orig_params, strategy, nn.RMSNorm(size))
    return said(functools.partial(FusedSGD, lr=1.0, max_grad_norm=1.0), model)


def later_bound(params):
    optimizer = FusedSGD(params, lr=1.0)
    optimizer.step()  # there are no gradients yet
    optimizer.max_grad_norm = 1.0
    return optimizer


def alone():
    """One worker, where torch makes NO_SHARD of the strategy."""
    strategy = ShardingStrategy.FULL_SHARD
    return {"whole": all_whole(strategy), "vectors": vectors(strategy)}


def together():
    """Two workers."""
    clipping = functools.partial(FusedSGD, lr=1.0, max_grad_norm=1.0)
    ratios = functools.partial(FusedLAMB, weight_decay=0.1, max_grad_norm=None)
    kinds = (torch.optim.AdamW, FusedAdamW, FusedSGD)
    return {
        "overflow": {
            f"{kind.__name__} {flat}": overflow(kind, use_orig_params=not flat)
            for kind in kinds
            for flat in (False, True)
        },
        "norms": {
            "clipping": refusal(clipping),
            "clipping, flat": refusal(clipping, use_orig_params=False),
            "bound set later": refusal(later_bound),
            "LAMB": refusal(FusedLAMB),
            "LAMB without clipping, flat": refusal(ratios, use_orig_params=False),
            "LAMB, float64": refusal(FusedLAMB, dtype=torch.float64),
        },
        "no norms": refusal(functools.partial(FusedSGD, lr=1.0)),
        "whole": all_whole(ShardingStrategy.NO_SHARD),
        "vectors": vectors(ShardingStrategy.NO_SHARD),
        "one element": vectors(ShardingStrategy.FULL_SHARD, 1, use_orig_params=False),
    }


if __name__ == "__main__":
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=WORKERS
    )
    print(json.dumps(alone() if WORKERS == 1 else together()))
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()
